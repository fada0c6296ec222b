"""Which optimizer steps what: kept apart from all that loads a model, for whoever only plans."""

#: what `TrainingArguments.optim` calls bitsandbytes' AdamW, and how its other optimizers' names begin
_ADAMW_OF_BITSANDBYTES = ("adamw_bnb_8bit", "adamw_8bit", "paged_adamw_32bit", "paged_adamw_8bit")
_OTHERS_OF_BITSANDBYTES = ("ademamix", "lion_", "rmsprop_bnb")


def optimizer_under_fsdp(name: str) -> str:
    """What steps parameters that FSDP shares out, for an optimizer of `TrainingArguments.optim`.

    bitsandbytes' kernels take whole tensors ("got mixed torch.Tensor and DTensor" at the first step). Its AdamW has an equal in torch: the
    same numbers, not rounded to 8 bits, 8 bytes per trained parameter over all processes together.

    Raises:
        `ValueError`: another one of bitsandbytes, which has none.
    """
    if name in _ADAMW_OF_BITSANDBYTES:
        return "adamw_torch_fused"
    if name.removeprefix("paged_").startswith(_OTHERS_OF_BITSANDBYTES):
        raise ValueError(
            f"optim={name!r} is bitsandbytes', which cannot step parameters that FSDP shares out between processes. Use optim='adamw_torch_fused', "
            "whose state is shared out too, or plain data parallelism."
        )
    return name
