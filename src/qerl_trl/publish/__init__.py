"""From a finished run to shareable files: merge, export, quantize, cards, uploads."""
