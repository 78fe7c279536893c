"""Streams: each has a state of its own over one model, in memory or in a file, bit for bit."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from concurrent.futures import wait
from typing import Any

import pytest
import torch

import acclimate
from acclimate.core.adapter import Adapter
from acclimate.errors import InputError, StateError
from acclimate.models.families import Sizes
from acclimate.serve.service import UNNAMED, Job, Refused, Service
from acclimate.serve.streams import Streams, TooManyStreams
from acclimate.testing.check import assert_identical, tiny_batches, tiny_model

SMALL = Sizes(patch=16, width=16, depth=2)


def adapter(**options: Any) -> Adapter:
    return acclimate.adapt(tiny_model(sizes=SMALL), "keel", **{"reply": "first", **options})


@pytest.mark.parametrize("resident", [3, 1])
def test_each_stream_continues_as_if_it_were_alone(tmp_path, resident):
    streams = Streams(adapter(), tmp_path, resident=resident)
    alone = {name: adapter(reply="last") for name in ("a", "ü/../b", "x" * 128)}
    for i, images in enumerate(tiny_batches(9)):
        name = list(alone)[i % 3]
        stream = streams.get(name)
        assert torch.equal(streams.adapter(images), alone[name](images))
        stream.note(streams.adapter.record, len(images), learned=True, milliseconds=0)
    for name, other in alone.items():
        streams.get(name)
        assert_identical(streams.adapter.state_dict(), other.state_dict(), name)
    assert len(streams) == 3 and len(streams.known) == resident
    streams.close()
    again = Streams(adapter(), tmp_path)
    assert len(again) == 3 and all(file.parent == tmp_path for file in tmp_path.rglob("*.safetensors"))
    again.get("ü/../b")
    assert_identical(again.adapter.state_dict(), alone["ü/../b"].state_dict(), "after a restart")
    again.close()


def test_streams_are_counted_while_others_come():
    streams = Streams(adapter())
    streams.get("a"), streams.get("b")
    file = streams._file

    def named(name: str) -> str:
        streams.known.setdefault(f"{name}{name}", None)  # as the thread of the model does at the same time
        return file(name)

    streams._file = named
    assert len(streams) == 2
    streams.known.pop("aa"), streams.known.pop("bb")
    streams.close()


def test_states_are_written_behind(tmp_path):
    streams = Streams(adapter(), tmp_path, interval=0)
    stream = streams.get("a")
    streams.adapter(tiny_batches(1)[0])
    stream.note(streams.adapter.record, 6, learned=True, milliseconds=0)
    streams.write_due()
    wait([stream.write])
    assert acclimate.load(tmp_path / "a.safetensors", tiny_model(sizes=SMALL)).steps == 1
    streams.close()


def test_a_write_that_fails_is_repeated(tmp_path):
    folder = tmp_path / "states"
    streams = Streams(adapter(), folder, interval=0)
    stream = streams.get("a")
    stream.changed = 0.0
    folder.rename(tmp_path / "gone")
    streams.write_due()
    wait([stream.write])
    (tmp_path / "gone").rename(folder)
    streams.write_due()
    wait([stream.write])
    assert streams.failures == 1 and (folder / "a.safetensors").exists()
    streams.close()


def test_streams_go_on_while_states_cannot_be_written(tmp_path):
    folder = tmp_path / "states"
    streams = Streams(adapter(), folder, resident=1)
    folder.rename(tmp_path / "gone")
    for name, images in zip("aba", tiny_batches(3)):
        learn(streams, name, images)
    assert streams.adapter.steps == 2, "it has lost its state"
    assert streams.failures and len(streams.known) == 2
    (tmp_path / "gone").rename(folder)
    learn(streams, "b", tiny_batches(1)[0])
    assert {*streams.known} == {"b"} and (folder / "a.safetensors").exists()
    streams.close()


def test_the_log_says_that_states_cannot_be_written(tmp_path, caplog):
    caplog.set_level("INFO", logger="acclimate.serve")
    folder = tmp_path / "states"
    streams = Streams(adapter(), folder, resident=1)
    folder.rename(tmp_path / "gone")
    service = Service(streams)
    for each in (job("a"), job("b"), job("a")):
        service.submit(each)
        each.reply.result(30)
    service.control(lambda: None).result(30)
    told = [json.loads(line) for line in caplog.messages if "cannot be written" in line]
    assert len(told) == 1 and "Cannot write" in told[0]["error"] and service.metrics.write_failures._value.get() >= 1
    (tmp_path / "gone").rename(folder)
    service.close()


def test_a_state_that_cannot_be_written_at_the_end_does_not_keep_others_from_it(tmp_path):
    streams = Streams(adapter(), tmp_path)
    learn(streams, "a", tiny_batches(1)[0]), learn(streams, "b", tiny_batches(1)[0])
    (tmp_path / "a.safetensors").mkdir()
    errors = streams.close()
    assert [str(error) for error in errors if "a.safetensors" in str(error)] and len(errors) == 1
    assert (tmp_path / "b.safetensors").is_file()


def test_a_damaged_file_is_refused_and_the_others_go_on(tmp_path):
    (tmp_path / "a.safetensors").write_bytes(b"broken")
    streams = Streams(adapter(), tmp_path)
    with pytest.raises(StateError, match="The file of the stream 'a' is not a state file"):
        streams.get("a")
    assert streams.get("b").name == "b" and "a" not in streams.known
    streams.remove("a")
    assert streams.get("a").name == "a"
    streams.close()


def test_limits_on_number_and_age(tmp_path):
    streams = Streams(adapter(), tmp_path, most=2, age=100)
    streams.get("a"), streams.get("b")
    with pytest.raises(TooManyStreams):
        streams.get("c")
    old = tmp_path / "old.safetensors"
    streams._files.add(old.name)
    old.touch()
    os.utime(old, (1, 1))
    streams.known["a"].used = time.time() - 200
    streams.write_due()
    assert not streams.has("a") and not old.exists() and streams.has("b") and streams.get("c").name == "c"
    streams.close()


def test_a_limit_on_the_bytes_of_all_states(tmp_path):
    streams = Streams(adapter(), tmp_path)
    streams.content("a")
    size = (tmp_path / "a.safetensors").stat().st_size
    streams.close()
    streams = Streams(adapter(), tmp_path, most_bytes=2 * size + size // 2)
    streams.get("b")  # has no file yet, and counts all the same
    with pytest.raises(TooManyStreams, match="bytes"):
        streams.get("c")
    assert not streams.has("c")
    assert streams.get("a").name == "a" and streams.get("b").name == "b", "those that exist go on"
    streams.remove("a")
    assert streams.get("c").name == "c"
    streams.close()


def learn(streams: Streams, name: str, images: torch.Tensor) -> torch.Tensor:
    stream = streams.get(name)
    logits = streams.adapter(images)
    stream.note(streams.adapter.record, len(images), learned=True, milliseconds=0)
    return logits


@pytest.mark.skipif(sys.platform == "win32", reason="Windows cannot lock a folder")
def test_servers_that_would_overwrite_each_other_do_not_share_a_folder(tmp_path):
    for first, second in ((False, False), (False, True), (True, False)):
        one = Streams(adapter(), tmp_path, shared=first)
        with pytest.raises(StateError, match="another server keeps its states in this folder"):
            Streams(adapter(), tmp_path, shared=second)
        one.close()
        Streams(adapter(), tmp_path, shared=second).close()


def test_a_stream_belongs_to_one_of_the_servers_that_share_a_folder(tmp_path):
    one, two = (Streams(adapter(), tmp_path, shared=True, age=100) for _ in range(2))
    alone = adapter(reply="last")
    first, second, third, fourth = tiny_batches(4)
    assert torch.equal(learn(one, "a", first), alone(first))
    one.release("a")  # as the server that takes over asks for it
    assert one.owner("a") == one.me and "a" not in one.known
    assert torch.equal(learn(two, "a", second), alone(second)), "nothing is lost"
    two._flush(two.known["a"])
    assert one.has("a") and torch.equal(learn(one, "a", third), alone(third)), "it comes back"
    learn(two, "a", fourth)  # without a release: from what was written
    assert two.owner("a") == two.me and int(two.adapter.steps) == 3
    two._flush(two.known["a"])
    content = (tmp_path / "a.safetensors").read_bytes()
    one._flush(one.known["a"])
    assert (tmp_path / "a.safetensors").read_bytes() == content, "a server that has lost a stream writes it no more"
    one.known["a"].used = time.time() - 200
    one.write_due()
    assert "a" not in one.known and two.has("a"), "nor does it remove the stream of another server for its age"
    two.remove("a")
    assert os.listdir(tmp_path) == [] and not one.has("a")
    assert torch.equal(learn(one, "a", first), adapter()(first)), "it begins with the source model"
    one.close(), two.close()


def test_a_state_can_be_taken_and_given_back(tmp_path):
    streams = Streams(adapter(), tmp_path)
    streams.get("a")
    first, second = tiny_batches(2)
    streams.adapter(first)
    streams.take_snapshot("a")
    content, state = streams.content("a"), streams.adapter.state_dict()
    streams.adapter(second)
    streams.rollback("a")
    assert_identical(streams.adapter.state_dict(), state, "rolled back")
    streams.replace("b", content)
    assert_identical(streams.adapter.state_dict(), state, "uploaded")
    streams.freeze("a", True)
    frozen = streams.content("a")
    for name, given, expected in (("b", frozen, True), ("b", content, False)):
        streams.replace(name, given)
        assert streams.known[name].frozen is expected, "as it was downloaded"
    with pytest.raises(StateError):
        streams.replace("b", content[:-1])
    assert_identical(streams.adapter.state_dict(), state, "after a wrong upload")
    other = acclimate.adapt(tiny_model(sizes=SMALL), "tent")
    other.save(tmp_path / "other")
    with pytest.raises(StateError, match="another run"):
        streams.replace("new", (tmp_path / "other").read_bytes())
    assert not streams.has("new")
    assert streams.known["b"].steps == 1
    streams.get("a").history.append({})
    streams.reset("a")
    assert int(streams.adapter.steps) == 0
    assert streams.known["a"].steps == 0 and not streams.known["a"].history, "what is shown is of the state before"
    with pytest.raises(StateError, match="no snapshot"):
        streams.rollback("b")
    streams.close()


# ---- the service ------------------------------------------------------------------------------------------------


class Held:
    """A service whose thread waits until it is let go, so that requests collect in its queue."""

    def __init__(self, **options: Any) -> None:
        self.service = Service(Streams(adapter()), **options)
        self._go = threading.Event()
        self.service.control(self._go.wait)

    def submit(self, *jobs: Job) -> list[Job]:
        for job in jobs:
            self.service.submit(job)
        return list(jobs)

    def go(self) -> None:
        self._go.set()


def job(stream: str, size: int = 2, **options: Any) -> Job:
    return Job(stream, tiny_batches(1, size=size)[0], **options)


def test_requests_that_wait_are_joined_and_streams_have_turns():
    held, served = Held(batch=5), []
    serve = held.service._serve

    def noted(jobs: list[Job], busy: bool) -> None:
        served.append((jobs[0].stream, [len(each.images) for each in jobs]))
        serve(jobs, busy)

    held.service._serve = noted
    jobs = held.submit(*(job("a") for _ in range(4)), job("b"), job("c", 9))
    held.go()
    for each in jobs:
        assert each.reply.result(30)[0].shape == (len(each.images), 10)
    held.service.close()
    assert served == [("a", [2, 2]), ("b", [2]), ("c", [9]), ("a", [2, 2])]


def test_requests_wait_for_others_for_a_bounded_time():
    service, served = Service(Streams(adapter()), batch=4, delay=30.0), []
    serve = service._serve

    def noted(jobs: list[Job], busy: bool) -> None:
        served.append((jobs[0].stream, len(jobs)))
        serve(jobs, busy)

    service._serve = noted
    first, other = job("a"), job("b")
    service.submit(first), service.submit(other)
    time.sleep(0.3)
    assert served == []
    second = job("a")
    service.submit(second)  # makes up a batch with the first
    first.reply.result(20), second.reply.result(20)
    assert served == [("a", 2)] and not other.reply.done()
    service._delay = 0.01
    service.control(lambda: None)
    other.reply.result(20)
    service._delay = 30.0
    last = job("a")
    service.submit(last)
    service.close()  # a service that closes does not wait
    assert last.reply.done() and served == [("a", 2), ("b", 1), ("a", 1)]


def test_a_full_queue_refuses_and_a_busy_one_only_predicts():
    held = Held(queue=8)
    jobs = held.submit(job("a", 6), job("b"))
    with pytest.raises(Refused) as refused:
        held.submit(job("a", 1))
    assert refused.value.code == 429 and refused.value.retry_after >= 1
    held.go()
    facts = [each.reply.result(30)[1] for each in jobs]
    assert facts == [{"learned": False, "reason": "overload"}, {"learned": True}]
    held.service.close()
    with pytest.raises(Refused) as refused:
        held.submit(job("a", 1))
    assert refused.value.code == 503


def test_a_batch_that_the_queue_can_never_hold_is_wrong():
    held = Held(queue=8)
    with pytest.raises(InputError, match="9 images, and the queue of this server holds 8"):
        held.submit(job("a", 9))
    held.go()
    held.service.close()


def test_a_reply_does_not_claim_what_wrong_images_of_another_request_prevent():
    held = Held()
    good, wrong = job("a"), job("a")
    wrong.images = 1e30 * torch.randn(wrong.images.shape, generator=torch.Generator().manual_seed(0))
    held.submit(good, wrong)
    held.go()
    assert good.reply.result(30)[1] == {"learned": False, "reason": "not finite"}
    with pytest.raises(InputError, match="not finite"):
        wrong.reply.result(30)
    held.service.close()
    assert held.service.streams.known["a"].learned == 0


def test_a_caller_that_has_left_costs_nothing():
    held = Held()
    gone, (other, last) = job("a"), (job("b"), job("a"))
    held.submit(gone, other, last)
    control = held.service.control(lambda: None)
    assert gone.reply.cancel() and control.cancel()
    held.go()
    assert last.reply.result(30)[1] == other.reply.result(30)[1] == {"learned": True}
    assert held.service.is_alive and held.service.streams.known["a"].images == len(last.images)
    held.service.close()


def test_a_request_that_waited_for_too_long_is_refused():
    held = Held(timeout=0.05)
    (late,) = held.submit(job("a"))
    time.sleep(0.1)
    held.go()
    with pytest.raises(Refused, match="waited"):
        late.reply.result(30)
    held.service.close()


def test_closing_serves_what_waits():
    held = Held()
    jobs = held.submit(job("a"), job("b"))
    closing = threading.Thread(target=held.service.close)
    closing.start()
    held.go()
    closing.join(30)
    assert all(each.reply.done() and not each.reply.exception() for each in jobs)


def test_a_sequence_starts_with_the_source_model_and_ends():
    service = Service(Streams(adapter()))
    images = tiny_batches(1)[0]
    logits = []
    for start, end in ((True, False), (False, False), (True, True)):
        each = Job("a", images, start, end)
        service.submit(each)
        logits.append(each.reply.result(30)[0])
    service.control(lambda: None).result(30)
    assert torch.equal(logits[0], logits[2]) and not torch.equal(logits[0], logits[1])
    assert not service.streams.has("a")
    service.close()


def test_what_is_known_of_a_stream_that_only_predicts_is_shown():
    service = Service(Streams(adapter()), show=False)
    for frozen in (False, True):
        service.control(lambda frozen=frozen: service.streams.freeze("a", frozen)).result(30)
        each = job("a", 6)
        service.submit(each)
        logits = each.reply.result(30)[0]
        if not frozen:
            service.control(lambda: setattr(service.streams.known["a"], "harm", 0.25)).result(30)
    service.control(lambda: None).result(30)
    learned, predicted = service.streams.known["a"].history
    expected = torch.distributions.Categorical(logits=logits).entropy().mean().item()
    assert predicted["entropy"] == pytest.approx(expected) and predicted["milliseconds"] > 0
    assert predicted["drift"] == learned["drift"] is not None and predicted["harm"] is None
    service.close()
    assert service.metrics.harm._value.get() == 0.25, "the latest estimate stays"


@pytest.mark.parametrize("resident", [2, 1])
def test_a_frozen_stream_stays_frozen_when_it_starts_and_ends(tmp_path, resident):
    service = Service(Streams(adapter(), tmp_path, resident=resident))
    service.control(lambda: service.streams.freeze("a", True)).result(30)
    for start, end in ((True, False), (False, True), (False, False)):
        service.control(lambda: service.streams.get("b")).result(30)  # with one place, the other one goes to its file
        each = job("a", start=start, end=end)
        service.submit(each)
        assert each.reply.result(30)[1] == {"learned": False, "reason": "frozen"}
    service.close()
    (tmp_path / "a.safetensors").write_bytes(b"broken")
    service = Service(Streams(adapter(), tmp_path))
    each = job("a", start=True)
    service.submit(each)
    assert each.reply.result(30)[1] == {"learned": True}
    service.close()


def test_unnamed_requests_may_be_only_predicted():
    service = Service(Streams(adapter()), learn_unnamed=False)
    for _ in range(2):
        each = Job(UNNAMED, tiny_batches(1)[0])
        service.submit(each)
        assert each.reply.result(30)[1] == {"learned": False, "reason": "unnamed"}
    assert int(service.control(lambda: service.adapter.steps).result(30)) == 0
    assert len(service.streams) == 0, "they need no place among the streams"
    learned = adapter(reply="last")
    learned(tiny_batches(1)[0])
    service.control(lambda: service.adapter.load_state_dict(learned.state_dict())).result(30)  # as from an older file
    each = Job(UNNAMED, tiny_batches(1)[0])
    service.submit(each)
    with torch.no_grad():
        assert torch.allclose(each.reply.result(30)[0], tiny_model(sizes=SMALL)(tiny_batches(1)[0]), atol=1e-5)
    assert [recent.source == recent.adapted for recent in service.recent] == [True]  # one image a second
    service.close()


def test_a_step_that_fails_behind_its_reply_is_counted_and_changes_nothing():
    service = Service(Streams(adapter()), show=False)
    images = tiny_batches(1)[0]
    first = Job("a", images)
    service.submit(first)
    first.reply.result(30)
    before = service.control(service.adapter.state_dict).result(30)
    learn = service.adapter.engine._learn

    def failing(*args: Any) -> Any:
        raise MemoryError

    service.adapter.engine._learn = failing
    second = Job("a", images)
    service.submit(second)
    assert second.reply.result(30)[0].shape == (6, 10)
    assert_identical(service.control(service.adapter.state_dict).result(30), before, "after a failed step")
    service.adapter.engine._learn = learn
    third = Job("a", images)
    service.submit(third)
    assert torch.equal(third.reply.result(30)[0], second.reply.result(30)[0])
    assert service.metrics.failures._value.get() == 1
    service.close()
