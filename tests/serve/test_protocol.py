"""The Open Inference Protocol: what is understood, and that nothing else does more than raise an `InputError`."""

from __future__ import annotations

import base64
import json
import random
from typing import Any

import numpy as np
import pytest

from acclimate.errors import InputError
from acclimate.serve.protocol import encode_text, parse, response

PIXELS = np.arange(2 * 3 * 2 * 2, dtype=np.float32).reshape(2, 3, 2, 2)


def told(**changes: Any) -> dict[str, Any]:
    only = {"name": "images", "datatype": "FP32", "shape": [2, 3, 2, 2], "data": PIXELS.ravel().tolist()}
    return {"inputs": [{**only, **changes}]}


def binary(content: bytes, **changes: Any) -> tuple[bytes, str]:
    request = told(**{"parameters": {"binary_data_size": len(content)}, **changes})
    del request["inputs"][0]["data"]
    text = json.dumps(request).encode()
    return text + content, str(len(text))


def test_numbers_in_json_and_in_binary_are_the_same():
    nested = told(data=PIXELS.tolist())
    for body, length in ((json.dumps(told()).encode(), None), (json.dumps(nested).encode(), None), binary(PIXELS.tobytes())):
        np.testing.assert_array_equal(parse(body, length).pixels, PIXELS)


def test_files_in_json_and_in_binary_are_the_same():
    files = [b"one", b"", b"three"]
    texts = [base64.b64encode(file).decode() for file in files]
    content = b"".join(len(file).to_bytes(4, "little") + file for file in files)
    body = json.dumps(told(datatype="BYTES", shape=[3], data=texts)).encode()
    assert parse(body, None).files == parse(*binary(content, datatype="BYTES", shape=[3])).files == files


@pytest.mark.parametrize(
    ("given", "name"), [(0, None), ("", None), (None, None), (7, "7"), ("camera 1", "camera 1"), (2**64 - 1, str(2**64 - 1))]
)
def test_a_sequence_names_a_stream(given, name):
    parameters = {"sequence_id": given, "sequence_start": True, "sequence_end": False}
    assert parse(json.dumps({**told(), "parameters": parameters}).encode(), None).sequence.id == name


def test_a_response_has_the_outputs_that_were_asked_for():
    logits = np.array([[0, 2], [3, 1]], np.float32)
    every = parse(json.dumps(told()).encode(), None)
    body, headers = response(every, "m", "1", logits, ("cat", "dog"), {})
    outputs = {output["name"]: output["data"] for output in json.loads(body)["outputs"]}
    assert outputs == {"logits": [0, 2, 3, 1], "class": [1, 0], "label": ["dog", "cat"]}
    wanted = [{"name": "label", "parameters": {"binary_data": True}}, {"name": "class"}]
    some = parse(json.dumps({**told(), "id": "mine", "outputs": wanted}).encode(), None)
    body, headers = response(some, "m", "1", logits, ("cat", "dog"), {})
    length = int(headers["Inference-Header-Content-Length"])
    answer = json.loads(body[:length])
    assert [output["name"] for output in answer["outputs"]] == ["label", "class"] and answer["id"] == "mine"
    assert body[length:] == encode_text(["dog", "cat"]) == b"\3\0\0\0dog\3\0\0\0cat"


@pytest.mark.parametrize(
    ("body", "length", "reason"),
    [
        (b"", None, "not JSON"), (b"[]", None, "not a JSON object"), (b"{}", None, "one input"),
        (b"[" * 100_000, None, "JSON"),
        (json.dumps(told(name="x")).encode(), None, "its name has to be"),
        (json.dumps(told(datatype="INT8")).encode(), None, "datatype"),
        (json.dumps(told(shape=[2, 3, 2])).encode(), None, "needs 12 numbers"),
        (json.dumps(told(shape=[-1, 3, 2, 2])).encode(), None, "whole numbers"),
        (json.dumps(told(shape=[2**60, 3, 2, 2])).encode(), None, "1 to 256 images"),
        (json.dumps(told(shape=[2, 2**40, 2, 2])).encode(), None, "numbers"),
        (json.dumps(told(shape=[2, 3, 2, 2] + [1] * 100)).encode(), None, r"The shape \[2, 3, .*\.\.\. is not a list"),
        (b'{"inputs": [{"name": "images", "datatype": "FP32", "shape": [1, %d, %d], "data": [0]}]}' % (10**4000, 10**4000),
         None, "is not a list of whole numbers"),
        (b'{"inputs": %s}' % (b"9" * 5000), None, "too many digits"), (b'{"inputs": "\xff"}', None, "not UTF-8. A file"),
        (*binary(PIXELS.tobytes(), parameters={"binary_data_size": "\ud800"}), r"is '\\ud800', but 96 bytes follow"),
        (json.dumps(told(data=["a"] * 24)).encode(), None, "numbers"),
        (json.dumps(told(data=[True] * 24)).encode(), None, "numbers"),
        (json.dumps(told(data=[1e300] * 24)).encode(), None, "NaN or infinity"),
        (json.dumps(told(data=[10**400] * 24)).encode(), None, "too large"),
        (json.dumps(told(data=[float("nan")] * 24)).encode(), None, "NaN or infinity"),
        (*binary(PIXELS.tobytes()[:-1]), "needs 96 bytes"), (*binary(np.full(24, np.inf, np.float32).tobytes()), "NaN"),
        (*binary(PIXELS.tobytes(), parameters={"binary_data_size": 95}), "96 bytes follow"),
        (binary(PIXELS.tobytes())[0], "99999", "not a number of bytes"), (binary(PIXELS.tobytes())[0], "-1", "not a number"),
        (binary(PIXELS.tobytes())[0], "9" * 5000, "not a number"),
        (*binary(b"\xff\xff\xff\xff", datatype="BYTES", shape=[1]), "truncated"),
        (json.dumps(told(datatype="BYTES", shape=[1], data=["?"])).encode(), None, "base64"),
        (json.dumps({**told(), "parameters": {"sequence_id": [1]}}).encode(), None, "sequence_id"),
        (json.dumps({**told(), "parameters": {"sequence_id": "x" * 129}}).encode(), None, "1 to 128"),
        (json.dumps({**told(), "parameters": {"sequence_id": "a\nb"}}).encode(), None, "printable"),
        (json.dumps({**told(), "parameters": {"sequence_id": "a\ufffd"}}).encode(), None, "printable"),
        (json.dumps({**told(), "parameters": {"sequence_id": ".."}}).encode(), None, "take out of paths"),
        (json.dumps({**told(), "outputs": [{"name": "other"}]}).encode(), None, "An output is named"),
    ],
)  # fmt: skip
def test_a_wrong_request_says_what_is_wrong(body, length, reason):
    with pytest.raises(InputError, match=reason) as refused:
        parse(body, length)
    assert str(refused.value).encode("ascii"), "a message that cannot be sent"


def test_ten_thousand_malformed_requests_raise_nothing_else():
    """Requests with random bytes exchanged, cut, doubled or inserted, and with random values in place of others."""
    rng = random.Random(0)
    values = [None, True, -1, 0, 2**70, 1.5, float("nan"), "", "x", [], [[]], {}, {"a": []}, ["a", 1], [None] * 3]
    values += [10**4200, [10**4200] * 4, [1] * 99, "\ud800"]
    messages = []
    for _ in range(10_000):
        request = {**told(), "parameters": {"sequence_id": 3}, "outputs": [{"name": "class", "parameters": {}}], "id": "a"}
        places = [request, request["parameters"], request["inputs"][0], request["outputs"][0]]
        where = rng.choice(places)
        where[rng.choice([*where])] = rng.choice(values)
        body, length = json.dumps(request).encode(), None
        if rng.random() < 0.5:
            body, length = binary(rng.randbytes(rng.choice([0, 95, 96])), shape=rng.choice([[2, 3, 2, 2], [1], values[0]]))
        at = rng.randrange(len(body))
        body = rng.choice([body, body[:at], body[:at] + rng.randbytes(3) + body[at:], body[:at] + body[: at + 9]])
        try:
            parse(body, length)
        except InputError as error:
            messages.append(str(error).encode())
    assert len(messages) > 6000 and max(map(len, messages)) < 300
