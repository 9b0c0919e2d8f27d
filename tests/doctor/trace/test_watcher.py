"""A watcher declares its events by overriding their methods, and its file is all that adds it."""

from __future__ import annotations

import pkgutil

import torch

from isotype.doctor.trace import tracer, watchers
from isotype.doctor.trace.context import EVENTS, Subscriptions, Watcher
from isotype.finding import Finding, Place, Severity


class CountsSteps(Watcher):
    order = 90
    steps = 0

    def stepped(self, optimizer):
        type(self).steps += 1

    def before_ops(self):
        return {"relu": (lambda op, args, kwargs: args[0], self.seen.append)}

    def __init__(self, context):
        super().__init__(context)
        self.seen = []

    def findings(self):
        return [Finding(code="TR099", severity=Severity.NOTE, message=f"{len(self.seen)} relus", place=Place())]


def test_every_file_of_the_folder_has_watchers_and_their_order_is_fixed():
    modules = {kind.__module__.rpartition(".")[2] for kind in watchers.every()}
    assert modules == {module.name for module in pkgutil.iter_modules(watchers.__path__)}
    assert len({kind.order for kind in watchers.every()}) == len(watchers.every())


def test_a_watcher_is_called_for_the_events_that_it_overrides():
    events = Subscriptions([CountsSteps(None), Watcher(None)])
    assert [event for event in EVENTS if getattr(events, event)] == ["stepped"]
    assert events.of_op("mul") == (None, None)


def test_two_watchers_of_one_op_are_both_called():
    told = []

    class Other(Watcher):
        def before_ops(self):
            return {"relu": lambda op, args, kwargs: told.append(args)}

    first = CountsSteps(None)
    before, after = Subscriptions([first, Other(None)]).of_op("relu")
    after(before(None, ("x",), None))
    assert first.seen == ["x"]
    assert told == [("x",)]


def test_a_trace_uses_a_watcher_that_was_added_to_the_folder(monkeypatch):
    found = [*watchers.every(), CountsSteps]
    monkeypatch.setattr(tracer, "every", lambda: found)
    monkeypatch.setattr(CountsSteps, "steps", 0)
    from isotype import trace

    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with trace(model) as seen:
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
    assert CountsSteps.steps == 1
    assert [f.message for f in seen.findings if f.code == "TR099"] == ["1 relus"]
