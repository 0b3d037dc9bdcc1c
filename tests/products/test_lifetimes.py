"""Handles and descriptors in any order of create, calculate and destroy."""

from __future__ import annotations

import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule, run_state_machine_as_test
from strategies import SETTINGS, valid_cases

import scaled_mm as sm
from scaled_mm.errors import ScaledMMError


class Life(RuleBasedStateMachine):
    """Any order of create, calculate and destroy: right numbers from what lives, a typed error from what does not."""

    device = "cpu"

    def __init__(self):
        super().__init__()
        self.handles = []
        self.descriptors = []

    @rule()
    def create_handle(self):
        self.handles.append(sm.Handle(self.device))

    @precondition(lambda self: self.handles)
    @rule(data=st.data(), case=valid_cases)
    def create_descriptor(self, data, case):
        handle = data.draw(st.sampled_from(self.handles))
        operands = case.make(self.device)
        try:
            made = sm.create_descriptor(handle, out=operands.poisoned_out(), **operands.inputs)
        except ScaledMMError:
            assert getattr(handle, "gone", False), "a living handle refused a valid product"
            return
        assert not getattr(handle, "gone", False), "a destroyed handle made a descriptor"
        self.descriptors.append([made, operands, True])

    @precondition(lambda self: self.descriptors)
    @rule(data=st.data())
    def calculate(self, data):
        descriptor, operands, alive = data.draw(st.sampled_from(self.descriptors))
        out = operands.poisoned_out()
        try:
            size = descriptor.workspace_size if alive else 0
            workspace = torch.empty(size, dtype=torch.uint8, device=self.device)
            descriptor.calculate(out, **operands.inputs, workspace=workspace)
        except ScaledMMError:
            assert not alive
            return
        assert alive, "a destroyed descriptor calculated"
        operands.check(out)

    @precondition(lambda self: self.descriptors)
    @rule(data=st.data())
    def destroy_descriptor(self, data):
        entry = data.draw(st.sampled_from(self.descriptors))
        entry[0].destroy()
        entry[2] = False

    @precondition(lambda self: self.handles)
    @rule(data=st.data())
    def destroy_handle(self, data):
        handle = data.draw(st.sampled_from(self.handles))
        handle.destroy()
        handle.gone = True

    def teardown(self):
        for descriptor, _, _ in self.descriptors:
            descriptor.destroy()
        for handle in self.handles:
            handle.destroy()


def test_any_order_of_create_calculate_and_destroy_is_safe(device):
    machine = type("LifeOnDevice", (Life,), {"device": device})
    run_state_machine_as_test(machine, settings=settings(max_examples=60, stateful_step_count=25, **SETTINGS))
