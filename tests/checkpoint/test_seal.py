import json

import pytest

from qerl_trl.checkpoint import seal
from qerl_trl.run import folder as run_folder

WEIGHTS = "adapter_model.safetensors"


def sealed(run, step, order=None, weights=b"weights"):
    """`order`: "never" leaves the checkpoint without a seal."""
    folder = run / f"checkpoint-{step}"
    folder.mkdir(parents=True)
    (folder / WEIGHTS).write_bytes(weights)
    (folder / "trainer_state.json").write_text(json.dumps({"global_step": step}))
    if order != "never":
        seal.seal(folder, {"global_step": step}, order=order)
    return folder


def finish(run, step):
    """Seals the run's folder, as `save_model` does at the end of a run."""
    with run_folder.sealing(run, {"global_step": step}):
        (run / WEIGHTS).write_bytes(b"the end")
        (run / "trainer_state.json").write_text(json.dumps({"global_step": step}))


def left(run):
    return sorted(path.name for path in run.iterdir())


@pytest.fixture
def whole(tmp_path):
    return sealed(tmp_path, 4)


def edit(folder, **changes):
    """The manifest with other content, and the digest of the one before."""
    content = json.loads((folder / seal.MANIFEST_NAME).read_text())
    (folder / seal.MANIFEST_NAME).write_text(json.dumps(content | changes))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda f: (f / seal.MANIFEST_NAME).unlink(), "stopped before the folder was complete"),
        (lambda f: (f / seal.MANIFEST_NAME).write_text('{"files"'), "unreadable"),
        (lambda f: edit(f, run={"seed": 2}), "changed after it was written"),
        (lambda f: (f / "trainer_state.json").unlink(), "trainer_state.json is missing"),
        (lambda f: (f / WEIGHTS).write_bytes(b"weight"), "has 6 bytes, 7 were written"),
        (lambda f: (f / WEIGHTS).write_bytes(b"weightZ"), "SHA-256 differs"),
    ],
    ids="no-manifest torn run missing truncated flipped".split(),
)
def test_damage_is_named_and_the_older_checkpoint_is_taken(tmp_path, damage, message, caplog):
    earlier, damaged = sealed(tmp_path, 2, 1), sealed(tmp_path, 4, 2)
    assert seal.problems(damaged) == [] and seal.last_checkpoint(tmp_path) == str(damaged)
    damage(damaged)
    assert message in seal.problems(damaged)[0]
    assert seal.last_checkpoint(tmp_path) == str(earlier)
    assert "checkpoint-4" in caplog.text and message in caplog.text


def test_verify_refuses_damage_and_warns_of_a_foreign_checkpoint(whole, caplog):
    (whole / "trainer_state.json").unlink()
    with pytest.raises(ValueError, match=r"trainer_state\.json is missing"):
        seal.verify(whole)
    (whole / seal.MANIFEST_NAME).unlink()
    seal.verify(whole)
    assert "unverified" in caplog.text


def test_a_checkpoint_is_kept_until_its_replacement_is_sealed(whole):
    run = whole.parent
    sealed(run, 2)
    seal.make_room(whole)
    sealed(run, 4, "never")
    kept = seal.last_checkpoint(run)
    assert kept == str(whole.with_name(".checkpoint-4.replaced"))
    seal.make_room(whole)  # removes the half-written one only
    assert seal.last_checkpoint(run) == kept
    sealed(run, 4)
    assert seal.last_checkpoint(run) == str(whole)
    seal.replaced(whole)
    assert left(run) == ["checkpoint-2", "checkpoint-4"]


def test_the_newest_is_the_last_sealed_at_any_step(tmp_path):
    for step in (4, 6, 8):
        sealed(tmp_path, step, seal.next_order(tmp_path))
    seal.discard(tmp_path / "checkpoint-6")  # a run that went back to step 4, and came to step 6 again
    seal.discard(tmp_path / "checkpoint-6")
    again = sealed(tmp_path, 6, seal.next_order(tmp_path))
    assert seal.order_of(again) == 4
    assert seal.last_checkpoint(tmp_path) == str(again) == run_folder.resumable(tmp_path)


def test_the_end_of_a_run_is_resumed_unless_a_checkpoint_is_newer(tmp_path):
    for step in (4, 8):
        sealed(tmp_path, step, seal.next_order(tmp_path))
    finish(tmp_path, 6)  # after going back
    assert run_folder.resumable(tmp_path) == str(tmp_path)
    since = sealed(tmp_path, 5, seal.next_order(tmp_path))
    assert run_folder.resumable(tmp_path) == str(since)


def test_rotation_removes_unsealed_checkpoints_first_and_keeps_the_new_and_the_best(tmp_path):
    for order, step in enumerate((2, 4), 1):
        sealed(tmp_path, step, order)
    sealed(tmp_path, 8, "never")  # killed while it was written
    new = sealed(tmp_path, 3, 3)
    seal.rotate(tmp_path, 3, keep=[new])
    assert left(tmp_path) == ["checkpoint-2", "checkpoint-3", "checkpoint-4"]
    seal.rotate(tmp_path, 2, keep=[new, tmp_path / "checkpoint-2"])
    for limit in (None, 0, 5):
        seal.rotate(tmp_path, limit, keep=[new])
    assert left(tmp_path) == ["checkpoint-2", "checkpoint-3"]
    seal.rotate(tmp_path, 1, keep=[new])
    assert left(tmp_path) == ["checkpoint-3"]
