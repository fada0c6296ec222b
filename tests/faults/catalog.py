"""The list of faults that must never pass silently, and the mark that a test of one of them carries.

A fault is injected at one module and judged at the product: the model on disk, the repository on the stand-in Hub, the engine's logits,
`results.json`. A test says what it has shown:

    @fault("R5.nan")                        # detected, and the message names object, reason and remedy (use `told`)
    @fault("R6.bit_flip", recovered=True)   # and the same command goes on without loss, at once or when the cause is gone
    @fault("R4.engine_hangs", remedy=False) # detected, but the message does not say what to do
    @fault("R8.sigterm", remedy=None, recovered=True)  # nothing is lost, and there is nothing to say

`python -m tests.faults.catalog` prints the table from these marks; tests/faults/test_catalog.py holds it to its goals. With `--items` it prints
what was found at 843f908 point by point, each with its tests and with what the same case did there ([`at_843f908`]).
"""

import ast
import contextlib
import json
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

GROUPS = {
    "R1": "environment",
    "R2": "checkpoint folder",
    "R3": "configuration, shape",
    "R4": "rollout, sync",
    "R5": "numerics, rewards",
    "R6": "checkpoint, resume",
    "R7": "merge, export, Hub",
    "R8": "process, resources",
    "S": "found silent at 843f908, beside the list",
}

_LIST = """
R1.no_cuda R1.driver_old R1.gpu_architecture R1.vllm_missing R1.vllm_version R1.vllm_abi R1.triton_missing R1.trl_peft_window
R2.truncated R2.empty R2.header_bomb R2.overlapping_offsets R2.missing_shard R2.extra_tensor
R2.wrong_packed_dtype R2.odd_k R2.scale_shape R2.scale_nan R2.global_scale_not_finite R2.global_scale_reciprocal
R2.w4a4_config R2.pickle_only
R3.bitsandbytes_base R3.tied_head_target R3.no_lora_match R3.bad_rank R3.adapter_kind_with_vllm R3.embedding_target R3.no_noise_match
R3.bad_schedule
R4.adapter_ignored R4.adapter_stale R4.prefix_cache_stale R4.adapter_half_written R4.unknown_keys R4.wake_without_weights R4.drift_after_wake
R4.engine_dead R4.engine_hangs R4.completions_or_logps_bad R4.logp_gap R4.noise_left_on
R5.plus_inf R5.minus_inf R5.nan R5.huge R5.raises R5.wrong_length R5.not_a_number R5.all_none R5.hangs R5.raised_outside_main_thread
R5.nan_loss R5.inf_gradient R5.entropy_collapse R5.equal_rewards
R6.truncated_weights R6.bit_flip R6.empty_file R6.missing_adapter R6.missing_tensors R6.nan_tensor R6.other_rank R6.missing_optimizer
R6.truncated_optimizer R6.missing_scheduler R6.missing_rng_state R6.damaged_trainer_state R6.half_written_folder R6.missing_entry
R6.resume_on_boundary R6.resume_inside_buffer R6.resume_num_iterations R6.resume_later_epoch R6.resume_after_sigkill R6.resume_with_noise
R7.merge_without_effect R7.tied_weights R7.merged_twice R7.other_revision R7.local_base_pushed R7.public_without_consent R7.token
R7.upload_interrupted
R8.out_of_memory_in_step R8.out_of_memory_at_start R8.sigterm R8.disk_full R8.two_runs_one_folder R8.rank_fails
""".split()

_FURTHER = """
S.token_in_uploads S.push_while_training_fails S.run_folder_edited S.wrong_base S.arms_share_folder S.finished_run_again
S.other_eval_problems S.probe_in_bf16 S.embedding_adapter_unsent S.noise_never_acts S.entropy_open_loop S.noise_uncorrected_in_transformers
S.model_folder_edited S.dense_tensor_nan S.negative_offsets S.reward_1e20 S.reward_hangs S.engine_logps_nan S.constant_logp_error
S.update_refused_after_change S.update_values_bad S.resume_other_data S.prompt_longer_than_model S.path_leads_out S.manifest_names_outside
S.rescue_loses_checkpoint S.results_lost_to_hub S.server_unauthenticated S.damaged_manifest S.odd_header S.engine_answer_garbage
S.packed_base_in_another_arm S.card_of_another_run
""".split()

#: what passed silently at 843f908, was lost, ended without a cause or was open to strangers, point by point -> the faults that stand for it
ITEMS: dict[str, str] = {
    "1. a token is published, or stands in a file": "S.token_in_uploads R7.token",
    "2. pushes during training fail as success": "S.push_while_training_fails",
    "3. merge and push read an edited run folder": "S.run_folder_edited",
    "4. another base of the same shapes": "S.wrong_base R7.other_revision R7.merged_twice",
    "5. arms share a folder; a finished run goes on; other held-out problems": "S.arms_share_folder S.finished_run_again S.other_eval_problems",
    "6. the check at start in bf16; embeddings unsent": "S.probe_in_bf16 S.embedding_adapter_unsent",
    "6. noise that never acts; the open loop; no correction": "S.noise_never_acts S.entropy_open_loop S.noise_uncorrected_in_transformers",
    "7. model folders are not verified; NaN in dense tensors": "S.model_folder_edited S.dense_tensor_nan",
    "8. overlapping and negative offsets": "S.negative_offsets R2.overlapping_offsets",
    "9. huge rewards; a reward that hangs": "S.reward_1e20 S.reward_hangs R5.huge R5.hangs",
    "10. log-probabilities NaN or shifted; noise left on; a stale cache": "S.engine_logps_nan S.constant_logp_error R4.noise_left_on R4.prefix_cache_stale",
    "11. a refused update changes the engine; bad values": "S.update_refused_after_change S.update_values_bad",
    "12. resume with other data, rewards, LoRA, optimizer": "S.resume_other_data",
    "12. prompts too long; paths out of the folder; crafted manifests": "S.prompt_longer_than_model S.path_leads_out S.manifest_names_outside",
    "lost: the checkpoint to its rescue, the results to the Hub": "S.rescue_loses_checkpoint S.results_lost_to_hub",
    "no cause: two runs in one folder, damaged manifests, odd headers": "R8.two_runs_one_folder S.damaged_manifest S.odd_header",
    "no cause: an NVFP4 base in another arm": "S.packed_base_in_another_arm",
    "no cause: vLLM missing or broken, a server that answers garbage": "R1.vllm_missing R1.vllm_abi S.engine_answer_garbage",
    "no cause: empty completions, out of memory, disk full": "R4.completions_or_logps_bad R8.out_of_memory_in_step R8.out_of_memory_at_start R8.disk_full",
    "a client of the server without a secret": "S.server_unauthenticated",
    "found later: a card shows the figures of another run": "S.card_of_another_run",
}  # fmt: skip

#: of those, what no case of at_843f908.py injects there, and why or where else
NOT_THERE = {"R2.overlapping_offsets": "S.negative_offsets, in quantize"}
#: every fault by its id: <group>.<name>
FAULTS = tuple(_LIST + _FURTHER)
#: written by at_843f908.py: commit -> case -> verdict
AT_843F908 = Path(__file__).with_name("at_843f908.json")
#: the 92 of the list proper
LISTED = tuple(_LIST)
#: faults that a machine without a GPU cannot be made to have, and why
NOT_HERE: dict[str, str] = {}
#: why a test that injects a fault may be skipped (conftest.py): no GPU, opted out, or a logger that nobody has to have, beside the stand-in
MAY_BE_SKIPPED = re.compile(r"needs an NVIDIA GPU|QERL_[A-Z_]+|(trackio|tensorboard) is not installed")


@dataclass(frozen=True)
class Shown:
    """What the tests of one fault show. `remedy`: `None` where none of them looks at a message, because the product is as if nothing had been."""

    remedy: bool | None
    recovered: bool


def fault(name: str, *, remedy: bool | None = True, recovered: bool = False) -> pytest.MarkDecorator:
    """Mark of a test that injects `name`; see the module."""
    assert name in FAULTS, f"{name!r} is not in the catalogue"
    assert remedy is not None or recovered, f"{name!r}: lost without a word"
    return pytest.mark.fault(name, remedy=remedy, recovered=recovered)


@contextlib.contextmanager
def told(
    kind: type[BaseException] | tuple[type[BaseException], ...], *words: str
) -> Iterator[pytest.ExceptionInfo[BaseException]]:
    """The block raises `kind`, and its message holds each of `words` (what was passed, the reason, the remedy), whatever the case."""
    assert len(words) >= 2, "name at least the object and the remedy"
    with pytest.raises(kind) as caught:
        yield caught
    text = str(caught.value)
    missing = [word for word in words if not re.search(re.escape(word), text, re.IGNORECASE)]
    assert not missing, f"{missing} not in: {text}"


def shown() -> dict[str, Shown]:
    """Fault -> what its tests in this folder show, read from their marks."""
    found: dict[str, Shown] = {}
    for file in sorted(Path(__file__).parent.rglob("test_*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "fault":
                values = {keyword.arg: ast.literal_eval(keyword.value) for keyword in node.keywords}
                for argument in node.args:
                    if isinstance(argument, ast.Constant) and argument.value in FAULTS:
                        before = found.get(argument.value, Shown(None, False))
                        said = [each for each in (before.remedy, values.get("remedy", True)) if each is not None]
                        found[argument.value] = Shown(
                            all(said) if said else None, before.recovered or values.get("recovered", False)
                        )
    return found


def tests_of() -> dict[str, list[str]]:
    """Fault -> `file::test` of those that inject it, from their marks (of a parametrized test, from the marks of its cases too)."""
    found: dict[str, list[str]] = {}
    for file in sorted(Path(__file__).parent.rglob("test_*.py")):
        tree = ast.parse(file.read_text())
        cases: dict[str, set[str]] = {}  # a list of cases with marks, by the name it is given
        for node in tree.body:
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                cases[node.targets[0].id] = _marked(node)
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                marked = {name for decorator in node.decorator_list for name in _marked(decorator)}
                names = {
                    n.id for decorator in node.decorator_list for n in ast.walk(decorator) if isinstance(n, ast.Name)
                }
                for name in sorted(marked.union(*(cases.get(each, set()) for each in names))):
                    found.setdefault(name, []).append(f"{file.stem}::{node.name}")
    return found


def _marked(node: ast.AST) -> set[str]:
    calls = (n for n in ast.walk(node) if isinstance(n, ast.Call) and getattr(n.func, "id", "") == "fault")
    return {a.value for call in calls for a in call.args if isinstance(a, ast.Constant) and a.value in FAULTS}


def at_843f908() -> dict[str, str]:
    """Fault -> what its cases did there, of those that were run there."""
    return _verdicts(lambda commit: commit.startswith("843f908"))


def since() -> tuple[str, dict[str, str]]:
    """(the latest other commit at which the same cases ran, fault -> what they did there)."""
    others = [commit for commit in json.loads(AT_843F908.read_text()) if not commit.startswith("843f908")]
    return (others[-1][:7], _verdicts(lambda commit: commit == others[-1])) if others else ("", {})


def _verdicts(wanted: Callable[[str], bool]) -> dict[str, str]:
    record = json.loads(AT_843F908.read_text()) if AT_843F908.is_file() else {}
    cases = next((found["cases"] for commit, found in record.items() if wanted(commit)), {})
    verdicts: dict[str, list[str]] = {}
    for name, outcome in cases.items():
        verdicts.setdefault(name.partition(":")[0], []).append(outcome["verdict"])
    return {name: ", ".join(sorted(set(said))) for name, said in verdicts.items()}


def items_table() -> str:
    """Markdown: point, fault, its tests, what the fault did at 843f908, and what the same case did since."""
    tests, there, (commit, now) = tests_of(), at_843f908(), since()
    rows = [f"| found at 843f908 | fault | tests | run there | the same at {commit} |", "|---|---|---|---|---|"]
    for point, faults in ITEMS.items():
        for name in faults.split():
            listed = tests.get(name, [])
            more = f" and {len(listed) - 2} more" if len(listed) > 2 else ""
            rows.append(
                f"| {point} | {name} | {', '.join(f'`{test}`' for test in listed[:2])}{more} | {there.get(name) or NOT_THERE[name]} "
                f"| {now.get(name, '')} |"
            )
            point = ""
    return "\n".join(rows)


def table() -> str:
    """Markdown: group, faults, detected, with remedy, without a message, recovered, not injected."""
    found, rows = shown(), []

    def counted(names: tuple[str, ...] | list[str]) -> str:
        tested = [found[name] for name in names if name in found]
        numbers = (
            len(names), len(tested), sum(s.remedy is True for s in tested), sum(s.remedy is None for s in tested),
            sum(s.recovered for s in tested), len(names) - len(tested),
        )  # fmt: skip
        return " | ".join(map(str, numbers))

    for group, title in GROUPS.items():
        rows.append(f"| {group} {title} | {counted([name for name in FAULTS if name.startswith(f'{group}.')])} |")
    rows.append(f"| **the list (R1 to R8)** | {counted(LISTED)} |")
    head = (
        "| group | faults | detected | message with remedy | nothing lost, nothing to say | recovered | not injected |\n"
        + "|---" * 7
        + "|\n"
    )
    return head + "\n".join(rows)


if __name__ == "__main__":
    print(items_table() if "--items" in sys.argv else table())
    print("\nNot injected:", " ".join(name for name in FAULTS if name not in shown()))
