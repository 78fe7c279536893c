"""Every command with arguments that cannot be right: one sentence that names the offending thing, and an exit code."""

from __future__ import annotations

import argparse
import json
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import acclimate
from acclimate.cli import _arguments, build_parser, main
from acclimate.data.corruptions import CONSTANTS
from acclimate.errors import ConfigError


class Malice:
    def __reduce__(self):
        return Path.touch, (Path("pwned"),)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with all kinds of files, most of which are not what a command wants."""
    root = tmp_path_factory.mktemp("place")
    for name, colour in (("cat", "red"), ("[/b]", "blue")):
        (root / "photos" / name).mkdir(parents=True)
        for number in range(2):
            Image.new("RGB", (32, 32), colour).save(root / "photos" / name / f"{number}.png")
    (root / "photo.png").write_bytes((root / "photos/cat/0.png").read_bytes())
    (root / "empty").mkdir()
    (root / "text.txt").write_text("nothing of interest")
    (root / "text.safetensors").write_text("nothing of interest")
    (root / "empty.safetensors").write_bytes(b"")
    (root / "folder.safetensors").mkdir()
    (root / "mine.py").write_text("raise SystemExit(3)")
    (root / "broken.py").write_text("x = (")
    (root / "malice.pth").write_bytes(pickle.dumps(Malice()))
    torch.save({"model": Malice()}, root / "malice.pt")
    torch.save({"head.weight": torch.zeros(3)}, root / "other.pth")
    np.save(root / "floats.npy", np.zeros(3))
    np.save(root / "objects.npy", np.array([Malice()]), allow_pickle=True)
    model = acclimate.adapt(acclimate.bundled.model(), "tent")
    model.save(root / "state.safetensors")
    acclimate.bench(methods=["source", "tent"], corruptions=["fog"], images=8, out=root / "runs")
    content = json.loads(next((root / "runs").glob("*/result.json")).read_text())
    for name, text in damaged(content).items():
        (root / "damaged" / name).mkdir(parents=True)
        (root / "damaged" / name / "result.json").write_text(text)
    words = {**dict.fromkeys(("name", "title", "caption"), "x"), "findings": [], "protocol": {}, "origin": {}}
    contents = (words, None), (words, "nothing"), ({**words, "findings": 3}, "<svg></svg>"), ([], "<svg></svg>")
    for name, (text, svg) in zip(FIGURES, contents):
        (root / "figures" / name).mkdir(parents=True)
        (root / "figures" / name / "x.json").write_text(json.dumps(text))
        if svg is not None:
            (root / "figures" / name / "x.svg").write_text(svg)
    for name, text in (("number", "3"), ("list", "[1]"), ("half", '{"seed"'), ("deep", "[" * 100_000)):
        (root / "trees" / name).mkdir(parents=True)
        (root / "trees" / name / "corruptions.json").write_text(text)
    (root / "ice").mkdir()
    (root / "ice" / "frost1.png").write_text("no image")
    (root / "locked").mkdir()
    for run in (root / "runs").iterdir():
        (root / "locked" / run.name / ".lock").mkdir(parents=True)
    return root


def damaged(content):
    """Return contents of a result file that are not right, each in its own way."""

    def changed(part, **values):
        return json.dumps({**content, part: {**content[part], **values}})

    return {
        "empty": "",
        "half": json.dumps(content)[: len(json.dumps(content)) // 2],
        "list": "[]",
        "number": "3",
        "null": "null",
        "binary": "\x00\x01",
        "no-result": json.dumps({"spec": content["spec"]}),
        "no-spec": json.dumps({"result": content["result"]}),
        "number-for-list": changed("result", events=3),
        "other-field": changed("result", surprise=1),
        "domain-is-long": changed("spec", domains=[["fog", 5, 5]]),
    }


FIGURES = ("no-svg", "bad-svg", "bad-words", "list")
NOWHERE = "{place}/nowhere"
COMMON = ["--out", "{place}/new"]
ROWS: dict[str, list[tuple[str, str]]] = {
    # command: arguments as text, and what the message has to say
    "": [
        ("", "COMMAND"),
        ("benhc", "'bench'"),
        ("bench extra", "'extra'"),
        ("[/b]", "[/b]"),
    ],
    "bench": [
        ("--metods source", "'--methods'"),
        ("--methods tnet", "'tent'"),
        ("--methods [/b]", "[/b]"),
        ("--methods tent,tent", "each once"),
        ("--methods tent:speed=1", "'speed'"),
        ("--methods tent:fast", "option=value"),
        ("--methods tent:lr=fast", "lr="),
        ("--methods tent:lr=nan", "lr="),
        ("--methods tent:lr=-1", "lr="),
        ("--methods tent:=1", "option"),
        ("--methods :", "method"),
        ("--methods {place}/nowhere.py", "nowhere.py"),
        ("--methods {place}/broken.py", "SyntaxError"),
        ("--methods {place}/mine.py", "SystemExit"),
        ("--methods {place}/empty.py", "empty.py"),
        ("--methods dda:denoiser={place}/malice.pt", "malice.pt"),
        ("--methods dda:denoiser={place}/text.txt", "text.txt"),
        ("--methods dda:denoiser={place}/empty", "empty"),
        ("--methods eata --source-statistics {place}/text.txt", "text.txt"),
        ("--methods eata --source-statistics {place}/state.safetensors", "state.safetensors"),
        ("--source-statistics {place}/nowhere", "nowhere"),
        ("--source-statistics {place}/empty", "is a folder"),
        ("--source-statistics ,", "--source-statistics"),
        ("--model vit_base_patch16_42", "vit_base_patch16_42"),
        ("--model [/b]", "[/b]"),
        ("--model {place}/nowhere.safetensors", "nowhere.safetensors"),
        ("--model {place}/text.safetensors", "text.safetensors"),
        ("--model {place}/empty.safetensors", "empty.safetensors"),
        ("--model {place}/folder.safetensors", "folder.safetensors"),
        ("--model {place}/state.safetensors", "state.safetensors"),
        ("--model test_vit --weights {place}/nowhere", "nowhere"),
        ("--model test_vit --weights {place}/empty", "is a folder"),
        ("--model test_vit --weights {place}/text.txt", "text.txt"),
        ("--model test_vit --weights {place}/malice.pth", "malice.pth"),
        ("--model test_vit --weights {place}/other.pth", "other.pth"),
        ("--model test_vit --weights {place}/empty.safetensors", "empty.safetensors"),
        ("--weights {place}/other.pth", "weights"),
        ("--mean 0.5", "std"),
        ("--mean 0.5,0.5,0.5 --std 0,0,0", "--std"),
        ("--mean nan,nan,nan --std 1,1,1", "--mean"),
        ("--mean 1,2 --std 1,2", "mean"),
        ("--data imagenet-d", "Did you mean 'imagenet"),
        ("--data [/b] --root {place}", "[/b]"),
        ("--data imagenet-c", "--root"),
        ("--data imagenet-c --root {place}/nowhere", "nowhere"),
        ("--data imagenet-c --root {place}/text.txt", "no folder"),
        ("--data imagenet-c --root {place}/empty", "empty"),
        ("--data folder --root {place}/empty", "empty"),
        ("--data folder --root {place}/photos", "classes"),
        ("--root {place}", "root"),
        ("--domains Art", "domains"),
        ("--data office-home --root {place} --domains Art,Atr", "Atr"),
        ("--corruptions fgo", "'fog'"),
        ("--corruptions [/b]", "[/b]"),
        ("--corruptions ,", "--corruptions"),
        ("--corruptions fog --full", "--full"),
        ("--severities 6", "--severities"),
        ("--severities 1,x", "--severities"),
        ("--constants mine", "--constants"),
        ("--images 8001", "images=8001"),
        ("--settings nomral", "nomral"),
        ("--settings mixed+continual", "mixed+continual"),
        ("--settings ,", "--settings"),
        ("--settings normal,gradual", "gradual"),
        ("--seeds 99999999999999999999", "--seeds"),
        ("--seeds -1", "--seeds"),
        ("--seeds 1,1", "--seeds"),
        ("--seeds ,", "--seeds"),
        ("--order {place}/nowhere --settings label-shift", "nowhere"),
        ("--order {place}/text.txt --settings label-shift", "text.txt"),
        ("--order {place}/floats.npy --settings label-shift", "floats.npy"),
        ("--order {place}/objects.npy --settings label-shift", "objects.npy"),
        ("--predict never", "--predict"),
        ("--precision float8", "--precision"),
        ("--device meta", "meta"),
        ("--device cuda:99", "cuda:99"),
        ("--device tpu9", "tpu9"),
        ("--device [/b]", "[/b]"),
        ("--device vulkan", "vulkan"),
        ("--threads 100000", "--threads"),
        ("--on slurm", "--on"),
        ("--shard 0/1", "--shard"),
        ("--shard 3/2", "--shard"),
        ("--shard 1", "--shard"),
        ("--shard 10/10 --methods source", "10/10"),
        ("--out {place}/text.txt", "text.txt"),
        ("--out {place}/text.txt/runs", "text.txt"),
        ("--out /proc/acclimate", "/proc/acclimate"),
        ("--out /dev/full", "/dev/full"),
        ("--methods source --corruptions fog --images 8 --out {place}/locked", ".lock"),
        ("--out", "--out"),
    ],
    "table": [
        ("", "DIR"),
        (NOWHERE, "nowhere"),
        ("{place}/text.txt", "not a folder"),
        ("{place}/empty", "no finished run"),
        *((f"{{place}}/damaged/{name}", name) for name in damaged({"spec": {}, "result": {}})),
        ("{place}/runs --methods dct", "none of the 2"),
        ("{place}/runs --methods [/b]", "none of the 2"),
        ("{place}/runs --settings bs1", "none of the 2"),
        ("{place}/runs --severities 9", "--severities"),
        ("{place}/runs --seeds x", "--seeds"),
        ("{place}/runs --model other", "none of the 2"),
        ("{place}/runs --paper normale", "'normal'"),
        ("{place}/runs --paper [/b]", "[/b]"),
        ("{place}/runs --paper normal", "does not belong"),
        ("{place}/runs --format pdf", "--format"),
        ("{place}/runs --format csv --out {place}", "is a folder"),
        ("{place}/runs --format csv --out /dev/full", "/dev/full"),
        ("{place}/runs --format csv --out {place}/text.txt/x", "text.txt"),
        ("{place}/runs --format csv --out /proc/acclimate", "/proc/acclimate"),
    ],
    "report": [
        ("", "DIR"),
        (NOWHERE, "nowhere"),
        ("{place}/damaged/half", "half"),
        ("{place}/runs --figures {place}/nowhere", "nowhere"),
        ("{place}/runs --figures {place}/empty", "empty"),
        *((f"{{place}}/runs --figures {{place}}/figures/{name}", name) for name in FIGURES),
        ("{place}/runs -o {place}", "is a folder"),
        ("{place}/runs --paper nothing", "nothing"),
    ],
    "analyze": [
        ("", "FIGURE"),
        ("rolout", "'rollout'"),
        ("rollout --corruption fgo", "'fog'"),
        ("rollout --method tnet", "'tent'"),
        ("rollout --method [/b]", "[/b]"),
        ("rollout --severity 6", "--severity"),
        ("rollout --rows 0", "--rows"),
        ("rollout --images 0", "--images"),
        ("rollout --out {place}/text.txt", "text.txt"),
        ("rollout --clean {place}/nowhere", "nowhere"),
        ("rollout --data folder --root {place}/empty", "empty"),
        ("rollout --device meta", "meta"),
        ("tsne --corruptions fog,fog", "each once"),
        ("sensitivity --seed -1", "--seed"),
        ("all --model nothing", "nothing"),
    ],
    "data": [
        ("", "COMMAND"),
        ("chekc", "'check'"),
        ("list extra", "'extra'"),
        ("check --data imagenet-c", "--root"),
        ("check --data imagenet-d --root {place}", "Did you mean 'imagenet"),
        ("check --data [/b] --root {place}", "[/b]"),
        ("check --data imagenet-c --root {place}/nowhere", "nowhere"),
        ("check --data imagenet-c --root {place}/empty", "empty"),
        ("check --data folder --root {place}/empty", "empty"),
        ("check --data imagenet-c --root {place} --corruptions fgo", "'fog'"),
        ("check --data imagenet-c --root {place} --severities 0", "--severities"),
        ("check --data folder --root {place} --file-list x", "file_list"),
        ("check --data visda-2021 --root {place} --file-list text.txt", "text.txt"),
    ],
    "paper": [
        ("table-normale", "'table-normal'"),
        ("[/b]", "[/b]"),
        ("rollout", "drawing"),
        ("table-normal", "--root"),
        ("table-normal --root {place}/nowhere", "nowhere"),
        ("table-office-home --root {place}/empty", "source model"),
        ("table-office-home --root {place}/empty --source-models {place}/nowhere", "nowhere"),
        ("table-office-home --root {place}/empty --source-models {place}/empty", "Art.safetensors"),
        ("table-cost --scale tiny", "--scale"),
        ("table-cost --root {place} --source-statistics {place}/text.txt", "text.txt"),
        ("table-ablation --scale small --out {place}/text.txt", "text.txt"),
        ("table-ablation --scale small --device meta", "meta"),
    ],
    "train-source": [
        ("", "--data"),
        ("--data imagenet", "--data"),
        ("--data office-home --root {place} --out {place}/x.safetensors", "--domains"),
        ("--data office-home --root {place} --domains Atr --out {place}/x.safetensors --model test_vit", "'Art'"),
        ("--data folder --root {place}/nowhere --out {place}/x.safetensors", "nowhere"),
        ("--data folder --root {place}/empty --out {place}/x.safetensors --model test_vit", "empty"),
        ("--data folder --root {place}/photos --out {place}/x.pth --model test_vit", "x.pth"),
        ("--data folder --root {place}/photos --out {place}/folder.safetensors --model test_vit", "is a folder"),
        ("--data folder --root {place}/photos --out {place}/x.safetensors --model nothing", "nothing"),
        ("--data folder --root {place}/photos --out {place}/x.safetensors --model test_vit --device meta", "meta"),
        (
            "--data folder --root {place}/photos --out {place}/x.safetensors --model test_vit --weights {place}/other.pth",
            "other.pth",
        ),
        (
            "--data folder --root {place}/photos --out {place}/text.safetensors --model test_vit --no-pretrained",
            "text.safetensors",
        ),
    ],
    "train-prompts": [
        ("", "--out"),
        ("--out {place}/x.pth", "x.pth"),
        ("--out {place}", "is a folder"),
        ("--out {place}/x.safetensors --device meta", "meta"),
        ("--out {place}/x.safetensors --stages 99", "stages"),
        ("--out {place}/x.safetensors --hidden 2000000000 --outputs 2000000000", "memory"),
        ("--out {place}/text.safetensors", "text.safetensors"),
        ("--out {place}/x.safetensors --domains Art", "domains"),
    ],
    "serve": [
        ("", "--model is missing"),
        ("--model nothing", "timm has no model"),
        ("--model bundled --method nothing", "nothing"),
        ("--model bundled --method tent:lr=x", "lr"),
        ("--model bundled --method tent:lr", "name:option=value"),
        ("--model bundled --method eata --source-statistics {place}/text.txt", "text.txt"),
        ("--model bundled --auth-token-file {place}/nowhere", "nowhere"),
        ("--model bundled --auth-token-file {place}/text.txt", "no spaces"),
        ("--model bundled --unnamed forget", "forget"),
        ("--model bundled --states {place}/text.txt", "text.txt"),
        ("--model bundled --port 99999", "99999"),
        ("--model bundled --resident 0", "--resident"),
        ("--model bundled --batch x", "--batch"),
        ("--model bundled --weights {place}/text.txt", "has weights of its own"),
        ("--model bundled --ssl-certfile {place}/nowhere", "nowhere"),
        ("--model bundled --ssl-keyfile {place}/text.txt", "needs --ssl-certfile"),
        ("--model bundled --ssl-certfile {place}/text.txt", "text.txt: no certificate"),
        ("--model bundled --name a/b", "no slash"),
        ("--model bundled --delay 2000 --timeout 2", "--delay 2000 milliseconds are not less than --timeout 2 seconds"),
        ("--model bundled --host 203.0.113.1 --port 0", "--host 203.0.113.1"),
        ("--model bundled --mehtod tent", "Did you mean '--method'? `acclimate"),
    ],
    "demo": [
        ("--method nothing", "nothing"),
        ("--method dct:lr", "dct:lr"),
        ("--method dct:lr=x", "lr"),
        ("--host 203.0.113.1 --port 0", "--host 203.0.113.1"),
        ("--port x", "--port"),
        ("--sliders", "--sliders"),
    ],
    "source-statistics": [
        ("", "--out"),
        ("--out {place}", "is a folder"),
        ("--out {place}/text.txt/x.safetensors", "text.txt"),
        ("--out {place}/x.safetensors --kinds fihser", "'fisher'"),
        ("--out {place}/x.safetensors --kinds ,", "--kinds"),
        ("--out {place}/x.safetensors --device meta", "meta"),
        ("--out {place}/x.safetensors --model nothing", "nothing"),
        ("--out {place}/x.safetensors --data folder --root {place}/nowhere", "nowhere"),
    ],
    "run": [
        ("", "--root"),
        ("--root {place}/nowhere --predictions {place}/x.csv", "nowhere"),
        ("--root {place}/ice --predictions {place}", "is a folder"),
        ("--root {place}/ice --predictions {place}/x.csv --method tnet", "'tent'"),
        ("--root {place}/ice --predictions {place}/x.csv --method tent:lr", "name:option=value"),
        ("--root {place}/ice --predictions {place}/x.csv", "frost1.png"),
        ("--root {place}/ice --predictions {place}/x.csv --load {place}/text.txt", "text.txt"),
        ("--root {place}/locked --predictions {place}/x.csv", "no images"),
    ],
    "methods": [
        ("--model resnet5O", "'resnet50'"),
        ("tent --model bundled", "not both"),
        ("tnet", "'tent'"),
        ("[/b]", "[/b]"),
        ("{place}/nowhere.py", "nowhere.py"),
        ("{place}/mine.py", "SystemExit"),
    ],
    "inspect": [
        ("", "FILE"),
        (NOWHERE, "nowhere"),
        ("{place}/text.txt", "text.txt"),
        ("{place}/empty", "empty"),
        ("{place}/empty.safetensors", "empty.safetensors"),
        ("{place}/malice.pth", "malice.pth"),
    ],
    "check": [
        ("", "METHOD"),
        ("tnet", "'tent'"),
        ("{place}/nowhere.py", "nowhere.py"),
        ("{place}/broken.py", "SyntaxError"),
        ("{place}", "{place}"),
    ],
    "replay": [
        ("", "FILE"),
        (NOWHERE, "nowhere"),
        ("{place}/empty", "is a folder"),
        ("{place}/text.txt", "text "),
        ("{place}/empty.safetensors", "empty "),
        ("{place}/state.safetensors", "state "),
    ],
    "corrupt": [
        ("", "IN"),
        ("{place}/photos", "OUT"),
        ("{place}/nowhere {place}/new", "nowhere"),
        ("{place}/text.txt {place}/new", "text.txt"),
        ("{place}/empty {place}/new", "empty"),
        ("{place}/photos {place}/text.txt", "text.txt"),
        ("{place}/photos {place}/photos/new", "photos"),
        ("{place}/photos {place}/runs", "runs"),
        *((f"{{place}}/photos {{place}}/trees/{name}", name) for name in ("number", "list", "half", "deep")),
        ("{place}/photos {place}/new --corruptions fgo", "'fog'"),
        ("{place}/photos {place}/new --corruptions ,", "--corruptions"),
        ("{place}/photos {place}/new --severities six", "--severities"),
        ("{place}/photos {place}/new --constants mine", "--constants"),
        ("{place}/photos {place}/new --frost {place}/nowhere", "nowhere"),
        ("{place}/photos {place}/new --frost {place}/empty --corruptions frost", "empty"),
        ("{place}/photos {place}/new --frost {place}/ice --corruptions frost", "ice"),
        ("{place}/text.txt --sheet {place}/sheet.png", "text.txt"),
        ("{place}/nowhere --sheet {place}/sheet.png", "nowhere"),
        ("{place}/photo.png --sheet {place}", "is a folder"),
        ("{place}/photo.png --sheet {place}/sheet.nothing", "sheet.nothing"),
        ("{place}/photo.png --sheet {place}/sheet.png --severities 3", "--sheet"),
    ],
    "dda": [
        ("", "IN"),
        ("{place}/nowhere {place}/new --denoiser {place}/malice.pt", "nowhere"),
        ("{place}/photos {place}/new", "--denoiser"),
        ("{place}/photos {place}/new --denoiser {place}/nowhere", "nowhere"),
        ("{place}/photos {place}/new --denoiser {place}/empty", "is a folder"),
        ("{place}/photos {place}/new --denoiser {place}/text.txt", "text.txt"),
        ("{place}/photos {place}/new --denoiser {place}/malice.pt", "malice.pt"),
        ("{place}/photos {place}/new --denoiser {place}/other.pth", "other.pth"),
        ("{place}/photos {place}/text.txt --denoiser {place}/other.pth", "text.txt"),
        ("{place}/photos {place}/new --denoiser {place}/other.pth --device meta", "meta"),
    ],
}  # fmt: skip
LINES = [(command, *row) for command, rows in ROWS.items() for row in rows]


@pytest.mark.parametrize(("command", "text", "said"), LINES, ids=[f"{c} {t}".strip() for c, t, _ in LINES])
def test_a_mistake_is_one_sentence(command, text, said, place, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    arguments = [word.format(place=place) for word in [command, *text.split()] if word]
    before = sorted(place.rglob("*"))
    code = main(arguments)
    shown = capsys.readouterr()
    # `replay` reports on each of its files
    error = shown.err if command != "replay" or shown.err else f"acclimate: {shown.out}"
    assert code in (1, 2)
    assert error.startswith("acclimate: ") and said.format(place=place) in error and "Traceback" not in error
    assert len(error.strip().splitlines()) == 1 and len(error) < 1200, error
    assert not (tmp_path / "pwned").exists(), "reading a file ran its code"
    kept = sorted(place.rglob("*"))
    assert [path for path in before if path not in kept] == [], "something is lost"


def leaves(parser, path=()):
    """Yield the parsers of all commands, with their words."""
    if parser.complete is not None:
        parser.complete()
        parser.complete = None
    parts = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    if not parts:
        yield path, parser
    for name, part in ((name, part) for action in parts for name, part in action.choices.items()):
        yield from leaves(part, (*path, name))


def test_every_command_has_its_rows():
    assert {path[0] for path, _ in leaves(build_parser())} == {*ROWS} - {""}
    assert all(len(rows) >= 4 for rows in ROWS.values()) and len(LINES) >= 250


def test_every_command_explains_itself(capsys):
    for path, _ in leaves(build_parser()):
        with pytest.raises(SystemExit) as ended:
            main([*path, "--help"])
        assert ended.value.code == 0 and capsys.readouterr().out.startswith(f"usage: acclimate {' '.join(path)}")


NO_NUMBERS = ("nan", "inf", "-inf", "x", "", "9" * 5000, "1e400", "-1", "0x10", "[/b]", "\udcff", "1;2")
NEGATIVE = {"--mean"}  # and only there


def test_every_number_is_refused_that_is_none_or_too_large():
    """Every argument that has a type and takes 2 takes a number, and is refused before anything is opened."""
    tried = 0
    for _, parser in leaves(build_parser()):
        for action in parser._actions:
            if not (action.option_strings and action.type and takes(action.type, "2")) or takes(action.type, "two"):
                continue
            for text in NO_NUMBERS:
                if text == "-1" and action.option_strings[0] in NEGATIVE:
                    continue
                with pytest.raises(ConfigError) as caught:
                    parser.parse_args([f"{action.option_strings[0]}={text}"])
                error = str(caught.value)
                assert action.option_strings[0] in error and len(error.splitlines()) == 1 and len(error) < 400, error
                tried += 1
    assert tried > 500


def takes(read, text):
    try:
        read(text)
    except (argparse.ArgumentTypeError, ValueError):
        return False
    return True


def test_choices_are_those_of_the_library():
    assert set(_arguments.CONSTANTS) == set(CONSTANTS)
