import json

import pytest

from qerl_trl.checkpoint import seal
from qerl_trl.publish import outgoing
from qerl_trl.run import folder as run_folder


@pytest.fixture
def whole(tmp_path):
    folder = tmp_path / "checkpoint-4"
    folder.mkdir()
    (folder / "adapter_model.safetensors").write_bytes(b"weights")
    (folder / "trainer_state.json").write_text("{}")
    seal.seal(folder, {"seed": 1, "model": "m"})
    return folder


def older(whole):
    folder = whole.with_name("checkpoint-2")
    folder.mkdir()
    (folder / "adapter_model.safetensors").write_bytes(b"older")
    seal.seal(folder)
    return folder


def test_sealed_is_whole(whole):
    assert seal.problems(whole) == []
    assert seal.last_checkpoint(whole.parent) == str(whole)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda f: (f / seal.MANIFEST_NAME).unlink(), "stopped before it was complete"),
        (lambda f: (f / seal.MANIFEST_NAME).write_text('{"files"'), "unreadable"),
        (lambda f: (f / seal.MANIFEST_NAME).write_text("[]"), "unreadable"),
        (lambda f: (f / seal.MANIFEST_NAME).write_bytes(b"\xff\xfe{}"), "unreadable"),
        (lambda f: (f / seal.MANIFEST_NAME).write_text('{"files": {"a": {}}, "run": {}}'), "unreadable"),
        (lambda f: (f / seal.MANIFEST_NAME).write_text('{"files": {"a": 3}, "run": {}}'), "unreadable"),
        (
            lambda f: seal.write_json_atomically(
                f / seal.MANIFEST_NAME, {"files": {"../x": {"bytes": 1, "sha256": ""}}, "run": {}}
            ),
            "outside of the folder",
        ),
        (lambda f: (f / "trainer_state.json").unlink(), "trainer_state.json is missing"),
        (lambda f: (f / "adapter_model.safetensors").write_bytes(b"weight"), "has 6 bytes, 7 were written"),
        (lambda f: (f / "adapter_model.safetensors").write_bytes(b"weightZ"), "SHA-256 differs"),
    ],
    ids="no-manifest torn-manifest list not-utf8 no-bytes no-entry outside missing-file truncated flipped".split(),
)
def test_damage_is_named_and_the_older_one_is_taken(whole, damage, message, caplog):
    earlier = older(whole)
    damage(whole)
    assert message in seal.problems(whole)[0]
    assert seal.last_checkpoint(whole.parent) == str(earlier)
    assert "checkpoint-4" in caplog.text
    assert message in caplog.text


def test_no_checkpoint_at_all(tmp_path):
    assert seal.last_checkpoint(tmp_path) is None
    assert seal.last_checkpoint(tmp_path / "missing") is None


def test_verify_refuses_damage(whole):
    (whole / "trainer_state.json").unlink()
    with pytest.raises(ValueError, match=r"trainer_state\.json is missing"):
        seal.verify(whole)


def test_verify_accepts_a_foreign_checkpoint_with_a_warning(whole, caplog):
    (whole / seal.MANIFEST_NAME).unlink()
    seal.verify(whole)
    assert "unverified" in caplog.text


def test_discard_removes_the_folder(whole):
    seal.discard(whole)
    assert not whole.exists()
    seal.discard(whole)  # nothing there is fine


def test_the_whole_checkpoint_of_a_step_stays_until_the_new_one_is_sealed(whole):
    older(whole)
    seal.make_room(whole)
    whole.mkdir()
    (whole / "adapter_model.safetensors").write_bytes(b"half")
    kept = seal.last_checkpoint(whole.parent)
    assert kept == str(whole.with_name(".checkpoint-4.replaced"))
    seal.make_room(whole)  # the half-written one goes, the whole one does not
    assert seal.last_checkpoint(whole.parent) == kept
    whole.mkdir()
    (whole / "adapter_model.safetensors").write_bytes(b"new")
    seal.seal(whole)
    assert seal.last_checkpoint(whole.parent) == str(whole)
    seal.replaced(whole)
    assert not whole.with_name(".checkpoint-4.replaced").exists()


def test_manifest_appears_whole(whole, monkeypatch):
    """A crash while the manifest is written leaves the old one or none, never a torn one."""

    def crash(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(seal.os, "replace", crash)
    before = json.loads((whole / seal.MANIFEST_NAME).read_text())
    with pytest.raises(KeyboardInterrupt):
        seal.seal(whole, {"seed": 99})
    assert json.loads((whole / seal.MANIFEST_NAME).read_text()) == before


def test_a_manifest_that_was_edited_is_noticed(whole):
    manifest = json.loads((whole / seal.MANIFEST_NAME).read_text())
    (whole / seal.MANIFEST_NAME).write_text(json.dumps({**manifest, "run": {"seed": 2}}))
    assert "changed after it was written" in seal.problems(whole)[0]


def sealed(run, step, order=None):
    folder = run / f"checkpoint-{step}"
    folder.mkdir(parents=True)
    (folder / "adapter_model.safetensors").write_bytes(b"weights")
    (folder / "trainer_state.json").write_text(json.dumps({"global_step": step}))
    if order != "never":
        seal.seal(folder, {"global_step": step}, order=order)
    return folder


def left(run):
    return sorted(path.name for path in run.iterdir())


def test_newest_is_what_was_sealed_last_whatever_its_step(tmp_path):
    for step in (4, 6, 8):
        sealed(tmp_path, step, seal.next_order(tmp_path))
    seal.discard(tmp_path / "checkpoint-6")  # a run that went back to step 4, and came to step 6 again
    again = sealed(tmp_path, 6, seal.next_order(tmp_path))
    assert seal.order_of(again) == 4
    assert seal.last_checkpoint(tmp_path) == str(again) == run_folder.resumable(tmp_path)


def test_a_run_that_has_ended_and_went_back_goes_on_from_what_it_came_to_since(tmp_path):
    sealed(tmp_path, 4, seal.next_order(tmp_path))
    with run_folder.sealing(tmp_path, {"global_step": 8}):
        (tmp_path / "adapter_model.safetensors").write_bytes(b"the end")
        (tmp_path / "trainer_state.json").write_text(json.dumps({"global_step": 8}))
    assert run_folder.resumable(tmp_path) == str(tmp_path)
    since = sealed(tmp_path, 6, seal.next_order(tmp_path))
    assert run_folder.resumable(tmp_path) == str(since)


def test_rotation_keeps_what_was_just_sealed_and_removes_what_never_was_first(tmp_path):
    sealed(tmp_path, 4, 1)
    sealed(tmp_path, 8, "never")  # killed while it was written
    new = sealed(tmp_path, 5, 2)
    seal.rotate(tmp_path, 2, keep=[new])
    assert left(tmp_path) == ["checkpoint-4", "checkpoint-5"]
    seal.rotate(tmp_path, 1, keep=[new])
    assert left(tmp_path) == ["checkpoint-5"]


def test_rotation_after_going_back_and_of_the_best_one(tmp_path):
    for order, step in enumerate((2, 4, 8), 1):
        sealed(tmp_path, step, order)
    new = sealed(tmp_path, 6, 4)
    seal.rotate(tmp_path, 2, keep=[new, tmp_path / "checkpoint-2"])
    assert left(tmp_path) == ["checkpoint-2", "checkpoint-6"]
    for limit in (None, 0, 5):
        seal.rotate(tmp_path, limit, keep=[new])
    assert left(tmp_path) == ["checkpoint-2", "checkpoint-6"]


def test_a_manifests_order_is_part_of_what_it_vouches_for(whole):
    seal.seal(whole, order=3)
    content = json.loads((whole / seal.MANIFEST_NAME).read_text())
    seal.write_json_atomically(whole / seal.MANIFEST_NAME, content | {"order": 9})
    assert "changed after it was written" in seal.problems(whole)[0]
    seal.write_json_atomically(whole / seal.MANIFEST_NAME, content | {"order": "9"})
    assert "changed after it was written" in seal.problems(whole)[0]


def test_who_goes_on_elsewhere_counts_on(tmp_path):
    """Copied back, what came later is newer."""
    for step in (50, 100, 150):
        sealed(tmp_path / "a", step, seal.next_order(tmp_path / "a"))
    since = seal.order_of(tmp_path / "a/checkpoint-150")
    for step in (200, 300):
        sealed(tmp_path / "b", step, seal.next_order(tmp_path / "b", since))
    for step in (200, 300):
        (tmp_path / f"b/checkpoint-{step}").rename(tmp_path / f"a/checkpoint-{step}")
    assert seal.last_checkpoint(tmp_path / "a") == str(tmp_path / "a/checkpoint-300")


def test_what_is_pushed_keeps_its_number(tmp_path):
    folder = sealed(tmp_path, 4, 7)
    sent = outgoing.checkpoint_files(folder, "last-checkpoint", {})
    (tmp_path / "again").mkdir()
    (tmp_path / "again" / seal.MANIFEST_NAME).write_bytes(sent[f"last-checkpoint/{seal.MANIFEST_NAME}"])
    assert seal.order_of(tmp_path / "again") == 7


def test_a_run_that_went_back_and_ended_without_a_checkpoint_is_what_it_ended_with(tmp_path):
    sealed(tmp_path, 4, seal.next_order(tmp_path))
    sealed(tmp_path, 8, seal.next_order(tmp_path))
    with run_folder.sealing(tmp_path, {"global_step": 6}):
        (tmp_path / "adapter_model.safetensors").write_bytes(b"the end")
        (tmp_path / "trainer_state.json").write_text(json.dumps({"global_step": 6}))
    assert run_folder.resumable(tmp_path) == str(tmp_path)
