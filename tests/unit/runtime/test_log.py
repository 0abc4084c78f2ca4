import io
import json
import logging
from collections.abc import Iterator

import pytest

from cenote.api.errors import ConfigError
from cenote.runtime.log import REQUEST_ID, get_logger, log_if_nobody_listens, setup_logging


@pytest.fixture
def stream() -> Iterator[io.StringIO]:
    root = logging.getLogger()
    handlers, level, raises = root.handlers[:], root.level, logging.raiseExceptions
    yield io.StringIO()
    root.handlers[:], logging.raiseExceptions = handlers, raises
    root.setLevel(level)


log = get_logger("cenote.test")


def lines(stream: io.StringIO) -> list[str]:
    return stream.getvalue().splitlines()


def test_text_lines_carry_the_fields(stream: io.StringIO) -> None:
    setup_logging("info", stream=stream)
    log.debug("unseen")
    log.info("attached", node="a 1", ratio=1 / 3, key=b"\x01\x02", empty="")
    (line,) = lines(stream)
    assert line.endswith('INFO    cenote.test attached node="a 1" ratio=0.333333 key=0102 empty=""')


def test_json_lines_carry_the_fields(stream: io.StringIO) -> None:
    setup_logging("debug", json=True, stream=stream)
    log.warning("attached", node="a", n=3, key=b"\x01", level="own", where=stream)
    (line,) = lines(stream)
    entry = json.loads(line)
    assert entry["level"] == "warning"
    assert entry["logger"] == "cenote.test"
    assert entry["message"] == "attached"
    assert (entry["n"], entry["key"], entry["field_level"]) == (3, "01", "own")
    assert "StringIO" in entry["where"]


def test_nothing_in_a_message_can_forge_a_line(stream: io.StringIO) -> None:
    setup_logging("info", stream=stream)
    log.info("bad\nERROR forged \x1b[31m", field="x\ny")
    assert len(lines(stream)) == 1
    assert "\x1b" not in stream.getvalue()


def test_a_message_is_never_a_format_string(stream: io.StringIO) -> None:
    setup_logging("info", stream=stream)
    log.info("100 %s of %d", n=1)
    assert lines(stream)[0].endswith("100 %s of %d n=1")


def test_records_of_other_loggers_come_out_in_the_same_form(stream: io.StringIO) -> None:
    setup_logging("info", json=True, stream=stream)
    logging.getLogger("other").error("code %d", 7)
    assert json.loads(lines(stream)[0])["message"] == "code 7"


def test_a_traceback_stays_in_its_json_line(stream: io.StringIO) -> None:
    setup_logging("info", json=True, stream=stream)
    try:
        raise KeyError("gone")
    except KeyError:
        log.exception("failed", step=2)
    entry = json.loads(lines(stream)[0])
    assert "KeyError: 'gone'" in entry["exception"]
    assert entry["step"] == 2


def test_set_up_twice_writes_once(stream: io.StringIO) -> None:
    setup_logging("info", stream=stream)
    setup_logging("WARNING", stream=stream)
    log.info("unseen")
    log.error("seen")
    assert len(lines(stream)) == 1
    assert not log.is_enabled(logging.INFO)


def test_an_endless_message_is_cut(stream: io.StringIO) -> None:
    setup_logging("info", stream=stream)
    log.info("x" * 1_000_000, field="y" * 1_000_000)
    assert len(stream.getvalue()) < 50_000


def test_an_unknown_level_is_refused() -> None:
    with pytest.raises(ConfigError, match="one of: debug, info, warning, error"):
        setup_logging("loud")


def test_inside_another_program_events_are_written_where_nobody_else_does(
    stream: io.StringIO, capsys: pytest.CaptureFixture[str]
) -> None:
    logging.getLogger().handlers[:] = []
    ours = logging.getLogger("cenote.embedded")
    try:
        log_if_nobody_listens("cenote.embedded")
        log_if_nobody_listens("cenote.embedded")
        get_logger("cenote.embedded.x").info("attached", node="a")
        assert capsys.readouterr().err.count("attached node=a") == 1
    finally:
        ours.handlers[:] = []
        ours.propagate = True
    setup_logging("info", stream=stream)
    log_if_nobody_listens("cenote.embedded")
    get_logger("cenote.embedded.x").info("seen once", node="a")
    assert len(lines(stream)) == 1
    assert not ours.handlers


@pytest.mark.parametrize("as_json", [True, False])
def test_what_is_logged_for_a_request_has_its_id(stream: io.StringIO, as_json: bool) -> None:
    setup_logging("info", json=as_json, stream=stream)
    log.info("before")
    token = REQUEST_ID.set("order-66")
    try:
        log.info("drained", node="a")
    finally:
        REQUEST_ID.reset(token)
    log.info("after")
    wanted = '"request": "order-66"' if as_json else "drained node=a request=order-66"
    assert [wanted in line for line in lines(stream)] == [False, True, False]
