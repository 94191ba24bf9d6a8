"""What one rank finds in folders of checkpoints: good ones, damaged ones, ones of other programs."""

import json
import logging
import os
import time
from pathlib import Path

import torch

from components.checkpoint.checkpointer import Checkpointer
from components.checkpoint.dcp import CheckpointError, Views
from components.checkpoint.folder import locate
from components.checkpoint.state import model_state, optimizer_state
from components.parameters import LogicalView
from tests.checkpoint.small_models import Named, one


def views(**shapes: tuple[int, ...]) -> Views:
    shapes = shapes or {"w": (2, 2)}
    return {name: LogicalView(name, shape, (0,) * len(shape), torch.ones(shape)) for name, shape in shapes.items()}


def saved(root: Path, *steps: int, best: int | None = None, **options) -> Checkpointer:
    checkpointer = Checkpointer(root, **options)
    for step in steps:
        checkpointer.save(step, views(), {"step": step}, best=step == best)
    return checkpointer


def steps(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir())


def refusal(action) -> str:
    try:
        action()
    except CheckpointError as error:
        assert "\n" not in str(error)
        return str(error)
    raise AssertionError("not refused")


def warnings_of(action) -> list[str]:
    heard = []
    handler = logging.Handler()
    handler.emit = lambda record: heard.append(record.getMessage())
    logging.getLogger("components.checkpoint").addHandler(handler)
    action()
    logging.getLogger("components.checkpoint").removeHandler(handler)
    return heard


def test_values_come_back_as_they_were(folder: Path):
    values = {"tokens": 2**40, "best_loss": 3.5, "recipe": {"training": {"steps": 3}}, "rng": [1, "x", None]}
    Checkpointer(folder / "values").save(1, views(), values)
    assert Checkpointer(folder / "values").values(1) == values


def test_dtypes_are_converted(folder: Path):
    saved(folder / "dtype", 1)
    target = {"w": LogicalView("w", (2, 2), (0, 0), torch.zeros(2, 2, dtype=torch.bfloat16))}
    Checkpointer(folder / "dtype").load(1, target)
    assert target["w"].local.eq(1).all()


def test_the_last_two_and_the_best_are_kept(folder: Path):
    checkpointer = saved(folder / "prune", 1, 2, 3, 4, 5, best=2, keep_latest_k=2)
    assert steps(folder / "prune") == ["step-2", "step-4", "step-5"]
    assert checkpointer.best() == 2 and checkpointer.latest() == 5
    checkpointer.save(6, views(), {}, best=True)
    assert steps(folder / "prune") == ["step-5", "step-6"]


def test_zero_keeps_all(folder: Path):
    saved(folder / "all", 1, 2, 3)
    assert steps(folder / "all") == ["step-1", "step-2", "step-3"]


def test_steps_are_ordered_as_numbers(folder: Path):
    assert saved(folder / "numbers", 9, 10, 100, keep_latest_k=2).latest() == 100
    assert steps(folder / "numbers") == ["step-10", "step-100"]


def test_saving_the_restored_step_again_does_nothing(folder: Path):
    saved(folder / "again", 1)
    checkpointer = Checkpointer(folder / "again")
    checkpointer.load(1, views())
    written = (folder / "again" / "step-1" / "COMPLETE").stat().st_mtime_ns
    checkpointer.save(1, views(), {})
    assert (folder / "again" / "step-1" / "COMPLETE").stat().st_mtime_ns == written


def test_nothing_saved_is_not_an_error(folder: Path):
    assert Checkpointer(folder / "nothing").latest() is None
    assert "no checkpoint" in refusal(lambda: Checkpointer(folder / "nothing").load(3, views()))


def test_a_damaged_newest_is_named_and_the_one_before_used(folder: Path):
    root = folder / "flipped"
    saved(root, 1, 2)
    path = root / "step-2" / "__0_0.distcp"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    found = []
    heard = warnings_of(lambda: found.append(Checkpointer(root).latest()))
    assert found == [1]
    assert len(heard) == 1 and "step-2 is damaged: __0_0.distcp does not match its checksum" in heard[0]
    assert "step-2 is damaged" in refusal(lambda: Checkpointer(root).load(2, views()))


def test_every_file_is_covered_by_a_checksum(folder: Path):
    root = folder / "covered"
    saved(root, 1)
    for path in sorted((root / "step-1").iterdir()):
        if path.name != "COMPLETE":
            content = path.read_bytes()
            path.unlink()
            assert f"{path.name} is missing" in refusal(lambda: Checkpointer(root).load(1, views()))
            path.write_bytes(content)
    Checkpointer(root).load(1, views())


def test_a_newest_without_marker_is_named_and_the_one_before_used(folder: Path):
    root = folder / "partial"
    saved(root, 1, 2)
    (root / "step-2" / "COMPLETE").unlink()
    found = []
    heard = warnings_of(lambda: found.append(Checkpointer(root).latest()))
    assert found == [1] and "step-2 has no COMPLETE marker" in heard[0]


def test_a_first_save_that_was_interrupted_is_no_checkpoint(folder: Path):
    root = folder / "first"
    saved(root, 1)
    (root / "step-1" / "COMPLETE").unlink()
    assert Checkpointer(root).latest() is None
    saved(root, 1)
    assert steps(root) == ["step-1"] and Checkpointer(root).latest() == 1


def test_where_all_are_damaged_a_person_decides(folder: Path):
    root = folder / "all_damaged"
    saved(root, 1)
    (root / "step-1" / ".metadata").write_bytes(b"")
    message = refusal(lambda: Checkpointer(root).latest())
    assert ".metadata has 0 bytes" in message and "start afresh" in message


def test_a_garbled_marker_is_damage(folder: Path):
    root = folder / "garbled"
    saved(root, 1)
    (root / "step-1" / "COMPLETE").write_text("{")
    assert "is not a marker" in refusal(lambda: Checkpointer(root).load(1, views()))


def test_another_format_version_is_named(folder: Path):
    root = folder / "version"
    saved(root, 1)
    marker = root / "step-1" / "COMPLETE"
    marker.write_text(json.dumps(json.loads(marker.read_text()) | {"format": 99}))
    assert "format 99, this program reads format 1" in refusal(lambda: Checkpointer(root).load(1, views()))


def test_another_programs_checkpoint_is_refused_and_never_deleted(folder: Path):
    root = folder / "foreign"
    torch.distributed.checkpoint.save({"w": torch.ones(2)}, checkpoint_id=root / "step-1")
    assert "another program wrote it" in refusal(lambda: Checkpointer(root).load(1, views()))
    saved(root, 1, 2, keep_latest_k=1)
    assert steps(root) == ["aside-1-step-1", "step-2"]


def test_missing_and_unexpected_names_are_listed(folder: Path):
    root = folder / "names"
    Checkpointer(root).save(1, views(a=(2,), b=(2,), c=(2,)), {})
    message = refusal(lambda: Checkpointer(root).load(1, views(b=(2,), x1=(1,), x2=(1,), x3=(1,), x4=(1,))))
    assert "lacks x1, x2, x3 and 1 more" in message and "has, and this recipe has not, a, c" in message


def test_partial_loading_takes_what_both_have(folder: Path):
    root = folder / "lenient"
    Checkpointer(root).save(1, views(a=(2,), b=(2,)), {})
    target = views(b=(2,), x=(2,))
    for view in target.values():
        view.local.zero_()
    heard = warnings_of(lambda: Checkpointer(root).load(1, target, strict=False))
    assert target["b"].local.tolist() == [1, 1] and target["x"].local.tolist() == [0, 0]
    assert "lacks x" in heard[0]


def test_a_different_shape_is_named_and_nothing_is_changed(folder: Path):
    root = folder / "shape"
    Checkpointer(root).save(1, views(a=(2,), b=(2, 3)), {})
    target = views(a=(2,), b=(3, 2))
    target["a"].local.zero_()
    message = refusal(lambda: Checkpointer(root).load(1, target))
    assert "b has shape (2, 3)" in message and "(3, 2) in this recipe" in message
    assert target["a"].local.tolist() == [0, 0]


def test_a_tensor_that_was_saved_in_part_is_refused(folder: Path):
    root = folder / "part"
    Checkpointer(root).save(1, {"w": LogicalView("w", (4, 2), (1, 0), torch.ones(2, 2))}, {})
    assert "w is only partly in the checkpoint" in refusal(lambda: Checkpointer(root).load(1, views(w=(4, 2))))


def test_going_back_sets_the_abandoned_steps_aside(folder: Path):
    root = folder / "back"
    saved(root, 1, 2, 3)
    checkpointer = Checkpointer(root, keep_latest_k=1)
    checkpointer.load(1, views())
    heard = warnings_of(lambda: checkpointer.save(2, views(), {"history": "new"}))
    assert steps(root) == ["aside-1-step-2", "aside-1-step-3", "step-2"]
    assert len(heard) == 2 and checkpointer.values(2) == {"history": "new"}


def test_a_run_that_restored_nothing_overwrites_nothing(folder: Path):
    root = folder / "fresh"
    saved(root, 1)
    saved(root, 1)
    assert steps(root) == ["aside-1-step-1", "step-1"]


def test_a_failed_background_save_is_told_by_the_next_call(folder: Path):
    root = folder / "full"
    checkpointer = Checkpointer(root, async_mode="async")
    root.write_text("a file where the folder should be")
    checkpointer.save(1, views(), {})
    assert str(root) in refusal(checkpointer.wait)
    root.unlink()
    checkpointer.save(1, views(), {})
    assert checkpointer.latest() == 1


def test_a_background_save_returns_before_it_is_written(folder: Path):
    checkpointer = Checkpointer(folder / "background", async_mode="async")
    write = checkpointer._write
    checkpointer._write = lambda *arguments: (time.sleep(0.5), write(*arguments))
    began = time.monotonic()
    checkpointer.save(1, views(), {})
    assert time.monotonic() - began < 0.4
    checkpointer.wait()
    assert steps(folder / "background") == ["step-1"]


def test_two_tensors_of_one_name_are_refused(folder: Path):
    view = views()["w"]
    assert "two tensors are called optimizer.w.m" in refusal(lambda: optimizer_state([("m", view), ("m", view)]))


def test_names_do_not_know_of_compile_wrappers(folder: Path):
    inner = Named(weight=one(2))
    inner.register_buffer("bias", torch.zeros(2))
    model = torch.nn.Module()
    model.part = torch.nn.Module()
    model.part._orig_mod = inner
    assert set(model_state(model)) == {"model.part.weight", "model.part.bias"}


def test_a_path_means_a_step_or_the_newest(folder: Path):
    (folder / "dump" / "checkpoint").mkdir(parents=True)
    assert locate(folder / "dump") == (folder / "dump" / "checkpoint", None)
    assert locate(folder / "dump" / "checkpoint") == (folder / "dump" / "checkpoint", None)
    assert locate(folder / "dump" / "checkpoint" / "step-7") == (folder / "dump" / "checkpoint", 7)


def test_an_unreadable_root_is_one_sentence(folder: Path):
    (folder / "file").write_text("")
    os.makedirs(folder / "root")
    assert str(folder / "file") in refusal(lambda: Checkpointer(folder / "file" / "x").save(1, views(), {}))
