"""The state machines and the soak are tested, too: a broken line makes them fail."""

import logging

import pytest
from hypothesis import settings
from hypothesis.stateful import run_state_machine_as_test

from minivllm.engine.block_manager import BlockKey, BlockManager
from minivllm.engine.scheduler import Scheduler
from minivllm.request import RequestStatus
from tests import test_soak
from tests.test_engine import MACHINE_SETTINGS, EngineMachine


def forget_to_free_the_last_block(monkeypatch):
    free = BlockManager.free

    def broken(self, request_id):
        self.block_ids[request_id] = self.block_ids.get(request_id, [])[:-1]
        free(self, request_id)

    monkeypatch.setattr(BlockManager, "free", broken)


def forget_that_a_preempted_request_has_nothing(monkeypatch):
    def broken(self, request):
        self.running.remove(request)
        self.block_manager.free(request.request_id)
        request.status = RequestStatus.PREEMPTED
        self.waiting.append(request)

    monkeypatch.setattr(Scheduler, "_stop_running", broken)


def forget_the_text_before_a_block(monkeypatch):
    def same_tokens(self, other):
        return other is not None and self.token_ids == other.token_ids

    monkeypatch.setattr(BlockKey, "__eq__", same_tokens)
    monkeypatch.setattr(BlockKey, "__hash__", lambda self: hash(self.token_ids))


BROKEN_LINES = [
    forget_to_free_the_last_block,
    forget_that_a_preempted_request_has_nothing,
    forget_the_text_before_a_block,
]


@pytest.mark.parametrize("break_it", BROKEN_LINES)
def test_the_state_machine_finds_a_broken_line(break_it, monkeypatch, caplog):
    caplog.set_level(logging.CRITICAL)
    break_it(monkeypatch)
    with pytest.raises((AssertionError, KeyError, IndexError, ValueError)):
        run_state_machine_as_test(
            EngineMachine,
            settings=settings(
                MACHINE_SETTINGS, print_blob=False, report_multiple_bugs=False
            ),
        )


@pytest.mark.parametrize("break_it", BROKEN_LINES)
def test_the_soak_finds_a_broken_line(break_it, monkeypatch, caplog):
    caplog.set_level(logging.CRITICAL)
    break_it(monkeypatch)
    with pytest.raises((AssertionError, KeyError, IndexError, ValueError)):
        test_soak.soak("mixed", 500)
