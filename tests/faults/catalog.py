"""Faults that must not pass silently, and the mark of a test that injects one.

A fault is injected at one module and judged at the product: model on disk, repository on the stand-in Hub, logits.

    @fault("R5.nan")                       # detected, with the object and the remedy in the message (`raises`)
    @fault("R6.damaged", recovered=True)   # the same command goes on without loss, at once or when the cause is gone

`python -m tests.faults.catalog` prints the table of docs/source/benchmarks.md.
"""

import ast
import contextlib
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

GROUPS = {
    "R1": "environment",
    "R2": "model folder",
    "R3": "configuration, shape",
    "R4": "rollout, sync",
    "R5": "numerics, rewards",
    "R6": "checkpoint, resume",
    "R7": "merge, export, Hub",
    "R8": "process, resources",
}
FAULTS = tuple(
    """
R1.vllm_missing R1.vllm_version R1.vllm_abi
R2.truncated R2.missing_shard R2.scale_shape R2.nan R2.global_scale R2.w4a4_config R2.pickle_only
R3.base_of_another_arm R3.tied_head_target R3.no_lora_match R3.bad_rank R3.adapter_kind_with_vllm R3.no_noise_match
R3.bad_schedule R3.prompt_longer_than_model
R4.adapter_ignored R4.adapter_stale R4.prefix_cache_stale R4.drift_after_wake R4.engine_dead R4.engine_hangs
R4.completions_or_logps_bad R4.logp_gap R4.noise_left_on R4.noise_never_acts R4.update_refused R4.server_unauthenticated
R5.infinite R5.nan R5.raises R5.wrong_length R5.not_a_number R5.all_none R5.hangs R5.nan_loss R5.inf_gradient
R6.damaged R6.missing_tensors R6.missing_optimizer R6.half_written_folder R6.resume R6.resume_inside_buffer
R6.resume_num_iterations R6.resume_after_sigkill R6.resume_with_noise R6.resume_other_data R6.arms_share_folder
R6.finished_run_again R6.two_runs_one_folder R6.other_eval_problems
R7.merge_without_effect R7.merged_twice R7.wrong_base R7.folder_edited R7.tied_weights R7.local_base_pushed
R7.public_without_consent R7.token R7.upload_interrupted R7.card_of_another_run
R8.out_of_memory R8.sigterm R8.disk_full R8.rank_fails
""".split()
)


def fault(name: str, *, recovered: bool = False) -> pytest.MarkDecorator:
    """Mark of a test that injects `name`; see the module."""
    assert name in FAULTS, f"{name!r} is not in the catalogue"
    return pytest.mark.fault(name, recovered=recovered)


@contextlib.contextmanager
def raises(
    kind: type[BaseException] | tuple[type[BaseException], ...], *words: str
) -> Iterator[pytest.ExceptionInfo[BaseException]]:
    """The block raises `kind` with each of `words` in its message: at least the object and the remedy."""
    assert len(words) >= 2
    with pytest.raises(kind) as caught:
        yield caught
    text = str(caught.value)
    missing = [word for word in words if not re.search(re.escape(word), text, re.IGNORECASE)]
    assert not missing, f"{missing} not in: {text}"


def marks() -> dict[str, list[bool]]:
    """Fault -> `recovered` of each mark in the tests of this folder."""
    found: dict[str, list[bool]] = {}
    for file in sorted(Path(__file__).parent.glob("test_*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("fault", "case"):
                recovered = node.func.id == "case" or any(keyword.arg == "recovered" for keyword in node.keywords)
                for argument in node.args:
                    if isinstance(argument, ast.Constant) and argument.value in FAULTS:
                        found.setdefault(argument.value, []).append(recovered)
    return found


def table() -> str:
    """Markdown: group, faults, recovered."""
    found, rows = marks(), ["| group | faults, each detected | recovered |", "|---|---|---|"]
    for group, title in [*GROUPS.items(), ("", "**all**")]:
        names = [name for name in FAULTS if name.startswith(group)]
        recovered = sum(any(found.get(name, [])) for name in names)
        rows.append(f"| {f'{group} {title}'.strip()} | {len(names)} | {recovered} |")
    return "\n".join(rows)


if __name__ == "__main__":
    print(table())
