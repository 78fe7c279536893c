"""Results are evidence: what was edited, mixed up or lost on the disk is refused by every command that reads it."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from test_grid import Samples, grid

from acclimate.cli import main
from acclimate.core import statefile
from acclimate.data.streams import Stream
from acclimate.errors import StateError
from acclimate.evaluation import jobs as work
from acclimate.evaluation.chain import read_records, seal_result
from acclimate.evaluation.journal import steps_of
from acclimate.evaluation.run import run
from acclimate.evaluation.store import Store

METHODS = {"tent": {"lr": 0.05}}
RESULT, STEPS, STATE = "result.json", "steps.jsonl", "state.safetensors"
LOST = "lost with all its steps: remove"
EDITS = 400  # random edits of a byte in each file


def streams(names=("fog", "snow")):
    return [Stream(Samples(name, 32), batch_size=8) for name in names]


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A folder with two finished runs, which tests copy before they edit them."""
    root = tmp_path_factory.mktemp("finished")
    grid(Store(root), streams=streams(), methods=METHODS)
    return root


@pytest.fixture(scope="module")
def interrupted(tmp_path_factory):
    """A folder with two runs that were interrupted after the third of four steps."""
    root = tmp_path_factory.mktemp("interrupted")

    def stopped(adapter, stream, on_step, journal, **options):
        def stop(scores, record):
            if record.step == 3:
                raise KeyboardInterrupt

        return run(adapter, stream, stop, journal, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(work, "run", stopped)
        for stream in streams():
            with pytest.raises(KeyboardInterrupt):
                grid(Store(root, every=0), streams=[stream], methods=METHODS)
    return root


@pytest.fixture
def copied(tmp_path):
    """Return a function that copies a folder of runs, so that it can be edited."""

    def copy(root: Path) -> tuple[Path, Path, Path]:
        """Return the copy, and the folders of the runs on fog and on snow."""
        new = shutil.copytree(root, tmp_path / "runs", dirs_exist_ok=True)
        return new, next(new.glob("tent-fog-*")), next(new.glob("tent-snow-*"))

    return copy


def refusal(capsys, *command) -> str:
    """Return the error of a command, which is one sentence on one line."""
    assert main([str(word) for word in command]) == 2
    error = capsys.readouterr().err
    assert error.startswith("acclimate: ") and error.count("\n") == 1 and error.endswith(".\n"), error
    return error


def leaves(value, path=()):
    """Yield the path of every value in a JSON file."""
    parts = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, part in parts:
        yield from leaves(part, (*path, key))
    yield path


def other(value):
    """Return another value that looks as plausible."""
    if isinstance(value, bool) or value is None:
        return not value
    return value + "x" if isinstance(value, str) else value + 1


def test_untouched_results_are_read(finished, capsys, tmp_path, monkeypatch):
    outcomes = Store(finished).outcomes()
    assert [o.spec.domains[0].name for o in outcomes] == ["fog", "snow"]
    assert [len(steps_of(o.folder, o.spec.id)) for o in outcomes] == [4, 4]
    assert main(["table", str(finished)]) == 0 and "tent" in capsys.readouterr().out
    assert main(["report", str(finished), "-o", str(tmp_path / "page.html")]) == 0
    monkeypatch.chdir(outcomes[0].folder)
    assert main(["table", "."]) == 0, "a run is known in its own folder too"
    moved = shutil.copytree(finished, tmp_path / "elsewhere" / "runs")
    assert len(Store(moved.parent).outcomes()) == 2, "a folder of runs may be moved"


def test_every_edited_field_of_a_result_is_refused(copied, finished, capsys):
    root, folder, _ = copied(finished)
    file = folder / RESULT
    whole = file.read_text()
    paths = [path for path in leaves(json.loads(whole)) if path]
    assert len(paths) > 100 and ("result", "top1") in paths and ("result", "seconds") in paths and ("card", "model") in paths
    for path in paths:
        content = json.loads(whole)
        within = content
        for key in path[:-1]:
            within = within[key]
        if isinstance(within[path[-1]], (dict, list)):
            del within[path[-1]]
        else:
            within[path[-1]] = other(within[path[-1]])
        file.write_text(json.dumps(content))
        with pytest.raises(StateError, match=r"result\.json|steps\.jsonl") as raised:
            Store(root).outcomes()
        assert LOST in str(raised.value) and str(folder) in str(raised.value), path
    error = refusal(capsys, "table", root)
    assert RESULT in error or STEPS in error
    assert refusal(capsys, "report", root, "-o", root / "page.html") == error
    with pytest.raises(StateError, match="lost"):
        grid(Store(root), streams=streams(["fog"]), methods=METHODS)
    file.write_text(json.dumps(json.loads(whole)))
    assert len(Store(root).outcomes()) == 2, "white space is no edit"


def journals(lines: list[bytes]) -> dict[str, list[bytes]]:
    """Return what may happen to the lines of a journal."""
    swapped = [lines[0], lines[2], lines[1], *lines[3:]]
    flipped = [lines[0], lines[1].replace(b'"used": 8', b'"used": 7'), *lines[2:]]
    assert flipped != lines
    spaced = [lines[0].replace(b", ", b",  ", 1), *lines[1:]]
    exchanged = [lines[0], lines[1][:-19] + lines[2][-19:], *lines[2:]]  # the digest of another line
    return {
        "flipped": flipped,
        "spaced": spaced,
        "exchanged": exchanged,
        "swapped": swapped,
        "first dropped": lines[1:],
        "middle dropped": [lines[0], *lines[2:]],
        "first twice": [lines[0], *lines],
        "last but one twice": [*lines[:2], lines[1], *lines[2:]],
        "blank": [lines[0], b"\n", *lines[1:]],
        "not JSON": [lines[0], b"\xff\x00{\n", *lines[2:]],
        "empty": [],
    }


def test_every_edited_journal_of_a_result_is_refused(copied, finished, capsys):
    root, folder, beside = copied(finished)
    lines = (folder / STEPS).read_bytes().splitlines(keepends=True)
    edits = journals(lines)
    edits |= {"last dropped": lines[:-1], "last twice": [*lines, lines[-1]], "torn": [*lines[:-1], lines[-1][:-5]]}
    edits |= {"longer": [*lines, b"{}\n"], "of another run": [(beside / STEPS).read_bytes()]}
    for edit, content in edits.items():
        (folder / STEPS).write_bytes(b"".join(content))
        error = refusal(capsys, "table", root)
        assert str(folder) in error and LOST in error, edit
        assert refusal(capsys, "report", root, "-o", root / "page.html") == error
    (folder / STEPS).write_bytes(b"".join(edits["swapped"]))
    assert f"Line 2 of {folder / STEPS} is not what the run wrote there" in refusal(capsys, "table", root)
    (folder / STEPS).unlink()
    assert f"{folder / STEPS} cannot be read" in refusal(capsys, "table", root)
    assert not (root / "page.html").exists()


def test_a_result_of_another_run_is_refused(copied, finished, capsys):
    root, fog, snow = copied(finished)
    shutil.copy(fog / RESULT, snow / RESULT)
    assert str(snow) in refusal(capsys, "table", root)
    shutil.copy(fog / STEPS, snow / STEPS)  # now they fit each other, but not their place
    error = refusal(capsys, "table", root)
    assert f"{snow / RESULT} is the result of another run: rename {snow} to {fog.name}, or remove it" in error
    with pytest.raises(StateError, match="result of another run"):
        grid(Store(root), streams=streams(["snow"]), methods=METHODS)
    shutil.rmtree(snow)
    fog.rename(snow)
    assert "result of another run" in refusal(capsys, "table", root)


@pytest.mark.parametrize("content", ["", "{", "[]", "3", '"spec"', "{}", '{"spec": {}}', "[" * 100_000, "\udcff"])
def test_what_is_not_a_result_is_named(copied, finished, capsys, content):
    root, folder, _ = copied(finished)
    (folder / RESULT).write_bytes(content.encode(errors="surrogateescape"))
    assert str(folder) in refusal(capsys, "table", root)


def test_a_result_of_another_version_is_named(copied, finished, capsys):
    root, folder, _ = copied(finished)
    content = json.loads((folder / RESULT).read_text())
    del content["chain"], content["result"]["ece"]
    (folder / RESULT).write_text(json.dumps(seal_result(content, read_records(folder / STEPS, folder.name[-16:])[1])))
    assert "is of another version of acclimate" in refusal(capsys, "table", root)


def _value(text: bytes):
    """Return the value of a JSON file, or None if it has none."""
    try:
        return json.loads(text)
    except ValueError:
        return None


@pytest.mark.parametrize("name", [RESULT, STEPS])
def test_no_edited_byte_changes_a_value_unseen(copied, finished, name):
    root, folder, _ = copied(finished)
    whole, draw, refused = (folder / name).read_bytes(), random.Random(name), 0
    for _ in range(EDITS):
        place, flip = draw.randrange(len(whole)), draw.randrange(1, 256)
        edited = bytes([*whole[:place], whole[place] ^ flip, *whole[place + 1 :]])
        (folder / name).write_bytes(edited)
        if name == RESULT and _value(edited) == json.loads(whole):
            assert len(Store(root).outcomes()) == 2
            continue
        with pytest.raises(StateError, match=re.escape(str(folder))):
            Store(root).outcomes()
        refused += 1
    assert refused > 0.9 * EDITS


def resume(root, names=("fog",)):
    return grid(Store(root, every=0), streams=streams(names), methods=METHODS)


def test_an_interrupted_run_goes_on_where_its_last_line_is_torn(copied, interrupted, finished):
    root, folder, _ = copied(interrupted)
    with (folder / STEPS).open("ab") as file:
        file.write(b'{"step": 4, "ima')
    (outcome,) = resume(root)
    assert outcome.result.digest == Store(finished).outcomes()[0].result.digest
    assert len(Store(folder).outcomes()) == 1


def test_every_edited_journal_of_an_interrupted_run_is_refused(copied, interrupted):
    root, folder, beside = copied(interrupted)
    lines = (folder / STEPS).read_bytes().splitlines(keepends=True)
    state = (folder / STATE).read_bytes()
    assert len(lines) == 3
    edits = journals(lines) | {"last dropped": lines[:-1], "of another run": [(beside / STEPS).read_bytes()]}
    edits |= {"torn": [*lines[:-1], lines[-1][:-5]]}
    for edit, content in edits.items():
        written = b"".join(content)
        (folder / STEPS).write_bytes(written)
        with pytest.raises(StateError, match=LOST) as raised:
            resume(root)
        assert str(folder) in str(raised.value), edit
        assert (folder / STEPS).read_bytes() == written and (folder / STATE).read_bytes() == state, "nothing is touched"
    (folder / STEPS).unlink()
    with pytest.raises(StateError, match=r"steps\.jsonl cannot be read"):
        resume(root)
    shutil.rmtree(folder)
    assert not resume(root)[0].found, "the advice helps"


def test_a_state_that_is_not_of_the_run_is_refused(copied, interrupted):
    root, fog, snow = copied(interrupted)
    shutil.copy(snow / STATE, fog / STATE)
    with pytest.raises(StateError, match=r"state\.safetensors does not follow from the lines of steps\.jsonl"):
        resume(root)
    (fog / STATE).write_bytes((snow / STATE).read_bytes()[:-9])
    with pytest.raises(StateError, match=LOST):
        resume(root)
    tensors, header = statefile.read(snow / STATE)
    statefile.write(snow / STATE, tensors, {"kind": "prompts"})
    with pytest.raises(StateError, match=LOST):
        resume(root, ["snow"])
    statefile.write(snow / STATE, tensors, header)
    assert resume(root, ["snow"])


def test_the_result_is_on_the_disk_before_the_state_is_removed(copied, interrupted, monkeypatch):
    root, folder, _ = copied(interrupted)
    events, flush, unlink = [], os.fsync, Path.unlink
    monkeypatch.setattr(os, "fsync", lambda file: (events.append(os.fstat(file).st_ino), flush(file))[1])
    monkeypatch.setattr(Path, "unlink", lambda path, **options: (events.append(path.name), unlink(path, **options))[1])
    resume(root)
    assert not (folder / STATE).exists()
    flushed = [(folder / STEPS).stat().st_ino, (folder / RESULT).stat().st_ino, folder.stat().st_ino]
    removed = events.index(STATE)
    written = events.index(flushed[1])
    assert flushed[0] in events[:written], "the steps"
    assert flushed[2] in events[written:removed], "the result, and then its name"


def test_an_error_keeps_the_state_of_an_interrupted_run(copied, interrupted, finished):
    root, folder, _ = copied(interrupted)
    spec = Store(finished).outcomes()[0].spec
    (folder / RESULT).write_text("{}")
    with pytest.raises(StateError, match=LOST):
        resume(root)
    with pytest.raises(ZeroDivisionError), Store(root).claim(spec):
        raise ZeroDivisionError
    assert (folder / STATE).exists()


@pytest.mark.parametrize("name", ["../../etc", "a/b", "</script>", "x" * 500, "C:\\x", "\udcff", "né"])
def test_a_name_cannot_lead_out_of_the_folder(finished, name):
    spec = Store(finished).outcomes()[0].spec
    for hostile in (replace(spec, method=name), replace(spec, setting=name)):
        assert hostile.folder.isascii() and Path(hostile.folder).name == hostile.folder and len(hostile.folder) < 130
        assert not set(hostile.folder) & set('/\\:<>"|?*')
    assert spec.folder == f"tent-fog-5-normal-2021-{spec.id}"
