"""The number format and everything that knows it: layouts on disk, the frozen layer, the quantizer behind
`from_pretrained`."""
