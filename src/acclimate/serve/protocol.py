"""The Open Inference Protocol (version 2) over HTTP: requests to tensors, and tensors to responses.

Both forms of a tensor are understood: numbers in JSON, and the binary extension, in which the tensors follow the JSON and
the header `Inference-Header-Content-Length` says where. There is one input, as numbers or as files:

| name | datatype | shape | content |
|---|---|---|---|
| images | FP32 | (batch, channels, height, width) | pixels as the model takes them, normalised |
| images | BYTES | (batch) | files of images (JPEG, PNG, ...), in JSON in base64; the model's own preprocessing is applied |

Whatever is wrong with a request raises an `InputError`. The types are written here: they are three dictionaries, and the
packages that define them bring a server of their own.
"""

from __future__ import annotations

import base64
import binascii
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from ..errors import InputError

HEADER = "Inference-Header-Content-Length"
NAME = "images"
OUTPUTS = {"logits": "FP32", "class": "INT64", "label": "BYTES"}
MOST_IMAGES = 256  # in a request
LONGEST_ID = 128
DEEPEST = 20  # nesting of JSON
MOST_SIDES = 8  # of a shape
LONGEST_SIDE = 2**31 - 1


@dataclass(frozen=True)
class StreamName:
    """The stream that a request belongs to: its name, and whether it starts or ends with this request."""

    id: str | None = None
    start: bool = False
    end: bool = False

    def or_from(self, address: StreamName) -> StreamName:
        """Return the stream of a request: its own name, or else that in its address. Either may say that it starts or ends.

        Raises:
            InputError: If a stream starts or ends that has no name.
        """
        found = StreamName(self.id or address.id, self.start or address.start, self.end or address.end)
        if found.id is None and (found.start or found.end):
            raise InputError("sequence_start and sequence_end need a sequence_id.")
        return found


@dataclass(frozen=True)
class InferRequest:
    """A request: pixels, or files of images, and what to return."""

    id: str
    sequence: StreamName
    pixels: npt.NDArray[np.float32] | None = None
    files: list[bytes] = field(default_factory=list)
    outputs: dict[str, bool] = field(default_factory=dict)  # by name: whether it is wanted in binary form


def parse(body: bytes, json_length: str | None) -> InferRequest:
    """Return the request in a body. `json_length` is the value of the header of the binary extension."""
    size = _json_size(body, json_length)
    return _parsed(json_object(body[:size]), memoryview(body)[size:])


def parse_stream(body: bytes, json_length: str | None) -> str | None:
    """Return the name of the stream that the request in a body belongs to."""
    return _sequence(_typed(json_object(body[: _json_size(body, json_length)]), "parameters", dict, {})).id


def _json_size(body: bytes, json_length: str | None) -> int:
    if json_length is None:
        return len(body)
    is_short = json_length.isascii() and json_length.isdigit() and len(json_length) < 20
    if not is_short or int(json_length) > len(body):
        raise InputError(f"{HEADER} is not a number of bytes of this body.")
    return int(json_length)


def json_object(text: bytes) -> dict[str, Any]:
    """Return the JSON object in a body."""
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise InputError(f"The request is not JSON: {error}.") from None
    except UnicodeDecodeError as error:
        advice = "A file of an image needs the header Content-Type: image/jpeg, or image/png."
        raise InputError(f"The request is not JSON: the byte at {error.start} is not UTF-8. {advice}") from None
    except RecursionError:
        raise InputError("The JSON of the request is nested too deeply.") from None
    except ValueError:
        raise InputError("The JSON of the request has a number of too many digits.") from None
    if not isinstance(value, dict):
        raise InputError("The request is not a JSON object.")
    return value


def _parsed(told: Mapping[str, Any], rest: memoryview) -> InferRequest:
    name = _typed(told, "id", str, "")
    about = _typed(told, "parameters", dict, {})
    inputs = _typed(told, "inputs", list, [])
    if len(inputs) != 1 or not isinstance(inputs[0], dict):
        raise InputError(f"Give one input, named {NAME!r}.")
    wanted = _outputs(_typed(told, "outputs", list, []), _typed(about, "binary_data_output", bool, False))
    only = inputs[0]
    if only.get("name") != NAME:
        raise InputError(f"The input is named {_shown(only.get('name'))}: its name has to be {NAME!r}.")
    shape = _typed(only, "shape", list, [])
    is_shape = 1 <= len(shape) <= MOST_SIDES and all(type(side) is int and 1 <= side <= LONGEST_SIDE for side in shape)
    if not is_shape or shape[0] > MOST_IMAGES:
        raise InputError(f"The shape {_shown(shape)} is not a list of whole numbers, with 1 to {MOST_IMAGES} images first.")
    content = _content(only, rest)
    sequence = _sequence(about)
    if only.get("datatype") == "FP32":
        return InferRequest(name, sequence, pixels=_numbers(content, shape), outputs=wanted)
    if only.get("datatype") == "BYTES":
        return InferRequest(name, sequence, files=_files(content, shape), outputs=wanted)
    raise InputError(f"The datatype of {NAME!r} is FP32 for pixels or BYTES for files, not {_shown(only.get('datatype'))}.")


def _typed(told: Mapping[str, Any], name: str, kind: type, default: Any) -> Any:
    value = told.get(name, default)
    if value is None:
        return default
    if type(value) is not kind:
        raise InputError(f"{name!r} is of the type {type(value).__name__}, expected {kind.__name__}.")
    return value


def _shown(value: Any) -> str:
    """Return a value of a request for a message: short, and of characters that can be sent."""
    text = ascii(value)
    return text if len(text) <= 80 else f"{text[:80]}..."


def _outputs(wanted: Sequence[Any], binary: bool) -> dict[str, bool]:
    found: dict[str, bool] = {}
    for output in wanted:
        if not isinstance(output, dict) or output.get("name") not in [*OUTPUTS]:
            raise InputError(f"An output is named {', '.join(OUTPUTS)}.")
        about = _typed(output, "parameters", dict, {})
        if "classification" in about:
            raise InputError("The classification extension is not supported: ask for the output 'class' or 'label'.")
        found[output["name"]] = _typed(about, "binary_data", bool, binary)
    return found or dict.fromkeys(OUTPUTS, binary)


def _sequence(about: Mapping[str, Any]) -> StreamName:
    name = about.get("sequence_id")
    if isinstance(name, bool) or not isinstance(name, (int, str, type(None))):
        raise InputError("sequence_id is a number or a text.")
    start, end = (_typed(about, f"sequence_{what}", bool, False) for what in ("start", "end"))
    if name in (None, 0, ""):  # 0 and "" are the values of clients that name no sequence
        return StreamName(None, start, end)
    return StreamName(require_stream(str(name)), start, end)


def stream_in_address(told: Mapping[str, str]) -> StreamName:
    """Return the stream that the parameters of an address name."""
    flags = {flag: told.get(flag, "false").lower() for flag in ("sequence_start", "sequence_end")}
    for flag, value in flags.items():
        if value not in ("true", "false"):
            raise InputError(f"{flag} is true or false, not {_shown(value)}.")
    name = told.get("sequence_id")
    return StreamName(require_stream(name) if name else None, *(value == "true" for value in flags.values()))


def require_stream(name: str) -> str:
    """Return the name of a stream, after checking that it is short and printable."""
    if not 1 <= len(name) <= LONGEST_ID or not name.isprintable() or "\ufffd" in name:  # which stands for wrong UTF-8
        raise InputError(f"sequence_id has 1 to {LONGEST_ID} printable characters.")
    if name in (".", ".."):
        raise InputError("sequence_id is . or .., which clients take out of paths.")
    return name


def _content(only: Mapping[str, Any], rest: memoryview) -> memoryview | list[Any]:
    """Return the binary content of the input, or its list of values."""
    size = _typed(only, "parameters", dict, {}).get("binary_data_size")
    if size is None:
        if len(rest):
            raise InputError("Bytes follow the JSON, but the input has no binary_data_size.")
        return _flat(only.get("data"))
    if type(size) is not int or size != len(rest):
        raise InputError(f"binary_data_size is {_shown(size)}, but {len(rest)} bytes follow the JSON.")
    if "data" in only:
        raise InputError("The input has both data and binary_data_size.")
    return rest


def _flat(data: Any, depth: int = 0) -> list[Any]:
    if not isinstance(data, list) or depth > DEEPEST:
        raise InputError("The input has neither a list 'data' nor binary_data_size.")
    if not any(isinstance(value, list) for value in data):
        return data
    return [value for part in data for value in _flat(part, depth + 1)]


def _numbers(content: memoryview | list[Any], shape: list[int]) -> npt.NDArray[np.float32]:
    count = math.prod(shape)
    if isinstance(content, memoryview):
        if len(content) != 4 * count:
            raise InputError(f"The shape {shape} of FP32 needs {4 * count} bytes, and there are {len(content)}.")
        pixels = np.frombuffer(content, "<f4")
    else:
        if len(content) != count or not all(type(value) in (int, float) for value in content):
            raise InputError(f"The shape {shape} needs {count} numbers in 'data'.")
        try:
            with np.errstate(over="ignore"):
                pixels = np.array(content, np.float32)
        except OverflowError:
            raise InputError("A number in 'data' is too large.") from None
    if not np.isfinite(pixels).all():
        raise InputError("The images contain NaN or infinity.")
    return pixels.reshape(shape)


def _files(content: memoryview | list[Any], shape: list[int]) -> list[bytes]:
    if len(shape) != 1:
        raise InputError(f"The shape of BYTES is [number of files], not {shape}.")
    found = _elements(content) if isinstance(content, memoryview) else [_decoded(text) for text in content]
    if len(found) != shape[0]:
        raise InputError(f"The shape is {shape}, but there are {len(found)} files.")
    return found


def _decoded(text: Any) -> bytes:
    try:
        return base64.b64decode(text if isinstance(text, str) else "*", validate=True)
    except (binascii.Error, ValueError):
        raise InputError("In JSON, a file of an image is a text in base64.") from None


def _elements(content: memoryview) -> list[bytes]:
    """Return the elements of a BYTES tensor: each is preceded by its length, as four bytes, the lowest first."""
    found: list[bytes] = []
    at = 0
    while at < len(content):
        end = at + 4 + int.from_bytes(content[at : at + 4], "little")
        if at + 4 > len(content) or end > len(content) or len(found) == MOST_IMAGES:
            raise InputError("The binary content of BYTES is truncated, or has too many elements.")
        found.append(bytes(content[at + 4 : end]))
        at = end
    return found


def response(
    request: InferRequest, model: str, version: str, logits: npt.NDArray[np.float32], labels: Sequence[str], facts: Any
) -> tuple[bytes, dict[str, str]]:
    """Return the body of a response, and its headers.

    Args:
        request: The request.
        model: The name of the model.
        version: Its version.
        logits: (batch, classes).
        labels: The names of the classes.
        facts: What is returned as the parameters of the response, for example whether the batch was learned from.
    """
    classes = logits.argmax(-1).astype(np.int64)
    values: dict[str, Any] = {
        "logits": logits.astype("<f4"),
        "class": classes.astype("<i8"),
        "label": [labels[each] for each in classes],
    }
    outputs, binary = [], b""
    for name, as_bytes in request.outputs.items():
        value = values[name]
        output: dict[str, Any] = {"name": name, "datatype": OUTPUTS[name], "shape": list(np.shape(value))}
        if as_bytes:
            encoded = encode_text(value) if name == "label" else value.tobytes()
            output["parameters"] = {"binary_data_size": len(encoded)}
            binary += encoded
        else:
            output["data"] = value if name == "label" else value.ravel().tolist()
        outputs.append(output)
    told = {"model_name": model, "model_version": version, "outputs": outputs, "parameters": facts}
    text = json.dumps({**told, "id": request.id} if request.id else told).encode()
    if not binary:
        return text, {"Content-Type": "application/json"}
    return text + binary, {"Content-Type": "application/octet-stream", HEADER: str(len(text))}


def encode_text(texts: Sequence[str]) -> bytes:
    """Return texts as a BYTES tensor."""
    encoded = [text.encode() for text in texts]
    return b"".join(len(each).to_bytes(4, "little") + each for each in encoded)
