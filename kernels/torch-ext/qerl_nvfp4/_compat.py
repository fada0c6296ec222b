"""Where our operators are registered: the Hub build gives every build its own namespace, a plain install has none."""

try:
    from ._ops import add_op_namespace_prefix  # written by kernel-builder
except ImportError:

    def add_op_namespace_prefix(op_name: str) -> str:
        return f"qerl_nvfp4::{op_name}"


__all__ = ["add_op_namespace_prefix"]
