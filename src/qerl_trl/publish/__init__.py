"""From a finished run to something that others can open: merge, export, quantize, cards, uploads."""
