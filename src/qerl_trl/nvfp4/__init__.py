"""NVFP4: the format, layouts on disk, the frozen layer, the quantizer behind `from_pretrained`."""
