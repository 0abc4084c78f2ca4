"""What a store daemon does next about its master."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cenote.api.errors import (
    CenoteError,
    DeadlineExceeded,
    InternalError,
    InvalidArgument,
    NodeNameTaken,
    NodeSuperseded,
    NotLeader,
    PermissionDenied,
    ProtocolError,
    ResourceUnavailable,
    SessionUnknown,
    StaleEpoch,
    TenureEnded,
    Unavailable,
)
from cenote.store import agent_core as core_module
from cenote.store.agent_core import AgentCore, Stage
from cenote.store.agent_steps import (
    Action,
    Attached,
    Beat,
    Beaten,
    CutOlder,
    Detach,
    Detached,
    End,
    Event,
    Execute,
    Executed,
    Failed,
    Found,
    Greeted,
    LookUp,
    OlderCut,
    Pause,
    Paused,
    SayHello,
    SendAttach,
)


def make(*masters: str, last_epoch: int = 0) -> AgentCore:
    return AgentCore(masters or ("a",), last_epoch=last_epoch, jitter=lambda: 0.0)


def leader(epoch: int = 3) -> Greeted:
    return Greeted(epoch, is_leader=True)


def attached_core(*masters: str, epoch: int = 3) -> AgentCore:
    core = make(*masters)
    core.start()
    core.handle(leader(epoch))
    core.handle(OlderCut(0))
    core.handle(Attached(epoch, 0.5))
    return core


def pause_then(core: AgentCore, action: Action) -> Action:
    assert isinstance(action, Pause)
    return core.handle(Paused())


def test_the_way_to_the_first_heartbeats() -> None:
    core = make("a", "b")
    assert core.start() == SayHello("a")
    assert not core.is_attached
    assert core.handle(leader()) == CutOlder(3)
    assert core.handle(OlderCut(0)) == SendAttach()
    assert core.stage is Stage.ATTACHING
    assert core.handle(Attached(3, 0.5)) == Beat(0.0, 0)
    assert core.is_attached
    assert core.handle(Beaten(3, 0, restless=False)) == Beat(0.5, 0)
    assert core.handle(Beaten(3, 0, restless=True)) == Beat(0.2, 0)
    assert core.handle(Beaten(3, 2, restless=False)) == Execute(0)
    assert core.handle(Executed(2, restless=False)) == Beat(0.5, 2)


def test_an_instruction_that_cannot_be_carried_out_does_not_spin() -> None:
    core = attached_core()
    assert core.handle(Beaten(3, 1, restless=False)) == Execute(0)
    pause = core.handle(Executed(0, restless=False))
    assert isinstance(pause, Pause)
    assert not pause.why  # it is in touch with its master; what has to wait is logged elsewhere
    assert core.handle(Paused()) == Beat(0.2, 0)


def test_writers_of_older_epochs_are_cut_before_the_attach() -> None:
    core = make()
    assert core.handle(leader(7)) == CutOlder(7)
    for _ in range(3):
        action = core.handle(OlderCut(2))
        assert isinstance(action, Pause)
        assert "2 writers of an older epoch" in action.why
        assert core.handle(Paused()) == CutOlder(7)
    assert core.handle(OlderCut(0)) == SendAttach()


def test_a_lost_connection_means_hello_and_no_new_attach() -> None:
    core = attached_core("a", "b")
    for n, error in enumerate((Unavailable("gone"), DeadlineExceeded("slow"))):
        assert core.handle(Failed(Unavailable())) == SayHello("b")  # at once
        action = core.handle(Failed(error))
        assert action == Pause(0.025 * (1 << n), str(error))
        assert core.is_attached
        assert core.handle(Paused()) == SayHello("a")
    assert core.handle(leader()) == Beat(0.0, 0)


def test_a_leader_past_its_tenure_is_neither_followed_nor_left() -> None:
    core = attached_core("a", "b")
    assert core.handle(Failed(TenureEnded())) == SayHello("b")
    assert core.handle(Greeted(3, is_leader=False, leaders=("a",))) == SayHello("a")
    past = Greeted(3, is_leader=True, past_tenure=True)
    assert isinstance(core.handle(past), Pause)
    assert core.is_attached
    assert core.handle(Paused()) == SayHello("b")
    assert core.handle(Greeted(3, is_leader=False)) == SayHello("a")
    assert core.handle(leader(3)) == Beat(0.0, 0)  # it proved that it leads
    # ... or another one does.
    core.handle(Failed(TenureEnded()))
    assert core.handle(leader(4)) == CutOlder(4)
    assert not core.is_attached


def test_while_a_successor_is_awaited_masters_are_asked_in_short_order() -> None:
    core = attached_core("a", "b")
    action = core.handle(Failed(Unavailable()))
    waited_s = 0.0
    for _ in range(60):
        if isinstance(action, Pause):
            waited_s = action.seconds
            action = core.handle(Paused())
        else:
            action = core.handle(Failed(Unavailable()))
    assert waited_s == 0.075
    for _ in range(400):  # nobody comes for long
        if isinstance(action, Pause):
            waited_s = action.seconds
            action = core.handle(Paused())
        else:
            action = core.handle(Failed(Unavailable()))
    assert waited_s == 0.5


def test_a_newer_epoch_means_a_new_attach() -> None:
    core = attached_core()
    core.handle(Failed(Unavailable()))
    core.handle(Paused())
    assert core.handle(leader(4)) == CutOlder(4)
    assert not core.is_attached
    core.handle(OlderCut(0))
    assert core.handle(Attached(4, 0.5)) == Beat(0.0, 0)
    # ... also when a heartbeat's answer tells it.
    assert core.handle(Beaten(5, 3, restless=False)) == SayHello("a")
    assert core.handle(leader(5)) == CutOlder(5)


def test_instructions_are_numbered_anew_by_each_attach() -> None:
    core = attached_core()
    core.handle(Beaten(3, 1, restless=False))
    assert core.handle(Executed(9, restless=False)) == Beat(0.5, 9)
    core.handle(Failed(SessionUnknown()))
    core.handle(leader())
    core.handle(OlderCut(0))
    assert core.handle(Attached(3, 0.5)) == Beat(0.0, 0)


@pytest.mark.parametrize("error", [SessionUnknown(), StaleEpoch()])
def test_a_master_that_does_not_know_the_daemon_gets_an_attach(error: CenoteError) -> None:
    core = attached_core()
    assert core.handle(Failed(error)) == SayHello("a")
    assert core.handle(leader()) == CutOlder(3)
    # Once more without success in between: not at once.
    assert isinstance(core.handle(Failed(error)), Pause)


def test_a_leader_that_changes_during_the_attach_is_attached_to_anew() -> None:
    core = make()
    core.handle(leader(3))
    core.handle(OlderCut(0))
    assert pause_then(core, core.handle(Attached(4, 0.5))) == SayHello("a")
    assert not core.is_attached
    assert core.handle(leader(4)) == CutOlder(4)


def test_a_master_with_an_older_epoch_is_never_followed() -> None:
    core = make("a", "b", last_epoch=5)
    assert core.handle(leader(4)) == SayHello("b")
    action = core.handle(leader(4))
    assert isinstance(action, Pause)
    assert "epoch 4, but this daemon followed 5" in action.why
    assert core.handle(Paused()) == SayHello("a")
    assert core.handle(leader(5)) == CutOlder(5)
    core = attached_core("a", epoch=5)
    assert isinstance(core.handle(Beaten(4, 1, restless=False)), Pause)


def test_a_standby_names_the_leader() -> None:
    core = make("a", "b")
    assert core.handle(Greeted(3, is_leader=False, leaders=("c",))) == SayHello("c")
    assert core.handle(Failed(NotLeader(addresses=["d"]))) == SayHello("d")
    assert core.handle(leader()) == CutOlder(3)
    # Its address is not kept: later the configured ones are asked.
    assert core.handle(Failed(Unavailable())) == SayHello("a")


def test_standbys_that_name_each_other_are_not_asked_in_circles() -> None:
    core = make("a", "b")
    action: Action = SayHello("a")
    hellos = 0
    while isinstance(action, SayHello):
        hellos += 1
        other = "b" if action.address == "a" else "a"
        action = core.handle(Greeted(1, is_leader=False, leaders=(other,)))
    assert hellos == 8
    assert isinstance(action, Pause)
    core.handle(Paused())
    assert core.handle(Greeted(1, is_leader=False)) == SayHello("b")
    assert isinstance(core.handle(Greeted(1, is_leader=False)), Pause)


def test_pauses_grow_to_a_bound_and_shrink_after_success() -> None:
    core = make()
    core.start()
    pauses = []
    for _ in range(12):
        action = core.handle(Failed(Unavailable("nobody there")))
        assert isinstance(action, Pause)
        pauses.append(action.seconds)
        core.handle(Paused())
    assert pauses == sorted(pauses)
    assert pauses[0] == 0.025
    assert pauses[-1] == 0.5
    core.handle(leader())
    core.handle(OlderCut(0))
    core.handle(Attached(3, 1.0))
    assert core.handle(Failed(Unavailable())) == Pause(0.025, "Unavailable")
    jittered = AgentCore(["a"], last_epoch=0, jitter=lambda: 0.999)
    action = jittered.handle(Failed(Unavailable()))
    assert isinstance(action, Pause)
    assert 0.049 < action.seconds < 0.05


@pytest.mark.parametrize("error", [InvalidArgument("name"), PermissionDenied("token")])
def test_what_cannot_be_right_ends_a_daemon_that_was_never_attached(error: CenoteError) -> None:
    core = make()
    core.handle(leader())
    core.handle(OlderCut(0))
    assert core.handle(Failed(error)) == End(error)
    assert core.stage is Stage.ENDED
    core = attached_core()
    assert core.handle(Failed(error)) == Pause(5.0, str(error))
    core.handle(Failed(SessionUnknown()))
    assert core.handle(Failed(error)) == Pause(5.0, str(error))


@pytest.mark.parametrize(
    "error", [ResourceUnavailable(), ProtocolError(), InternalError(), CenoteError("?")]
)
def test_anything_else_is_tried_again(error: CenoteError) -> None:
    core = make()
    assert pause_then(core, core.handle(Failed(error))) == SayHello("a")


def test_stopping_detaches_where_there_is_something_to_detach() -> None:
    core = attached_core()
    core.handle(Failed(Unavailable()))
    assert core.stop() == Detach()
    assert core.handle(Detached()) == End(None)
    assert core.handle(Failed(Unavailable())) == End(None)
    assert not core.is_attached
    core = make()
    core.start()
    assert core.stop() == End(None)


def test_a_daemon_needs_a_master() -> None:
    with pytest.raises(InvalidArgument, match="--master"):
        AgentCore([], last_epoch=0, jitter=lambda: 0.0)


ERRORS = st.sampled_from(
    [
        Unavailable(),
        NotLeader(addresses=["x"]),
        NotLeader(),
        SessionUnknown(),
        StaleEpoch(),
        InternalError(),
        DeadlineExceeded(),
    ]
)
EPOCHS = st.integers(0, 6)
FAILED = st.builds(Failed, ERRORS)
GREETED = st.builds(Greeted, EPOCHS, st.booleans(), st.sampled_from(["", "a", "b", "x"]))
ANSWERS: dict[type, st.SearchStrategy[Event]] = {
    SayHello: GREETED | FAILED,
    CutOlder: st.builds(OlderCut, st.integers(0, 2)),
    SendAttach: st.builds(Attached, EPOCHS, st.floats(0, 1e9)) | FAILED,
    Beat: st.builds(Beaten, EPOCHS, st.integers(0, 2), st.booleans()) | FAILED,
    Execute: st.builds(Executed, st.integers(0, 20), st.booleans()),
    Pause: st.just(Paused()),
}


def test_it_ends_where_a_later_process_has_attached() -> None:
    core = attached_core()
    error = NodeSuperseded("start 4 speaks after start 5")
    assert core.handle(Failed(error)) == End(error)
    assert core.stage is Stage.ENDED
    assert core.stop() == End(None)


def test_a_name_that_stays_taken_ends_it() -> None:
    core, error = make(), NodeNameTaken("node 1, called 'n', is alive")
    core.start()
    for _ in range(core_module.NAME_TAKEN_TRIES_MAX - 1):
        assert core.handle(Failed(error)) == Pause(core_module.NAME_TAKEN_PAUSE_S, str(error))
        assert core.handle(Paused()) == SayHello("a")
    assert core.handle(Failed(error)) == End(error)
    core = attached_core()
    for _ in range(2 * core_module.NAME_TAKEN_TRIES_MAX):
        assert isinstance(core.handle(Failed(error)), Pause)


@given(data=st.data(), events=st.integers(1, 40))
def test_whatever_comes_the_rules_hold(data: st.DataObject, events: int) -> None:
    """Every event that can come of an action, in any order."""
    core = AgentCore(["a", "b"], last_epoch=2, jitter=lambda: 0.5)
    action = core.start()
    cut_for, epochs, busy = 0, [2], 0
    for _ in range(events):
        event = data.draw(ANSWERS[type(action)])
        if isinstance(action, CutOlder):
            assert isinstance(event, OlderCut)
            cut_for = action.epoch if not event.left else 0
        action = core.handle(event)
        epochs.append(core.epoch)
        if isinstance(action, SendAttach):
            assert cut_for == core.epoch, "an attach without a cut before it"
        if isinstance(action, Beat):
            assert core.is_attached
            assert 0 <= action.wait_s <= core_module.BEAT_S_MAX
        # No event can make it ask the master over and over without a pause.
        busy = 0 if isinstance(action, Pause | Beat | Execute) else busy + 1
        assert busy <= 3 * (core_module.REDIRECTS_MAX + 3)
    assert epochs == sorted(epochs), "a master is followed upwards only"


# ---- masters that are looked up ------------------------------------------------------------------


def looking_up() -> AgentCore:
    core = AgentCore((), last_epoch=0, jitter=lambda: 0.0, look_up=True)
    assert core.start() == LookUp()
    return core


def test_masters_are_looked_up_first() -> None:
    core = looking_up()
    assert core.handle(Found(("a", "b"))) == SayHello("a")
    assert core.handle(Greeted(3, True)) == CutOlder(3)


def test_where_nothing_is_found_it_is_tried_again_after_a_pause() -> None:
    core = looking_up()
    pauses = []
    for _ in range(5):
        pause = core.handle(Failed(Unavailable("no etcd")))
        assert isinstance(pause, Pause)
        assert "no etcd" in pause.why
        pauses.append(pause.seconds)
        assert core.handle(Paused()) == LookUp()
    assert pauses == sorted(pauses)
    assert 0 < pauses[0] < pauses[-1] <= 1.0
    assert core.handle(Found(("a",))) == SayHello("a")


def test_what_looking_up_can_never_do_ends_a_daemon_that_was_never_attached() -> None:
    error = PermissionDenied("etcd wants a password")
    assert looking_up().handle(Failed(error)) == End(error)


def rounds_in_vain(core: AgentCore, action: Action, most: int = 50) -> list[str]:
    """Whom it asks until it looks up who is there."""
    asked: list[str] = []
    for _ in range(most):
        match action:
            case LookUp():
                return asked
            case SayHello(address):
                asked.append(address)
                action = core.handle(Failed(Unavailable("nobody")))
            case _:
                assert isinstance(action, Pause)
                action = core.handle(Paused())
    raise AssertionError("it never looked")


def test_masters_are_looked_up_again_after_some_rounds_in_vain() -> None:
    core = looking_up()
    asked = rounds_in_vain(core, core.handle(Found(("a", "b"))))
    assert asked == ["a", "b"] * core_module.ROUNDS_PER_LOOK_UP
    assert core.handle(Found(("c",))) == SayHello("c")


def test_those_known_are_asked_on_where_looking_up_fails() -> None:
    core = looking_up()
    rounds_in_vain(core, core.handle(Found(("a", "b"))))
    assert isinstance(core.handle(Failed(Unavailable("no etcd"))), Pause)
    action = core.handle(Paused())
    assert isinstance(action, SayHello)
    asked = rounds_in_vain(core, action)
    assert set(asked) == {"a", "b"}
    assert len(asked) == 2 * core_module.ROUNDS_PER_LOOK_UP


def test_a_leader_that_was_found_ends_the_search() -> None:
    core = looking_up()
    core.handle(Found(("a", "b")))
    core.handle(Greeted(1, True))
    core.handle(OlderCut(0))
    assert core.handle(Attached(1, 1.0)) == Beat(0.0, 0)
    asked = rounds_in_vain(core, core.handle(Failed(Unavailable("it died"))))
    assert asked == ["b", "a"] * (core_module.ROUNDS_PER_LOOK_UP - 1) + ["b"] or len(asked) >= 4


def test_without_a_place_to_look_nothing_is_looked_up() -> None:
    core = make("a", "b")
    action: Action = core.start()
    with pytest.raises(AssertionError, match="never looked"):
        rounds_in_vain(core, action)
