"""What a client may put into a request as it likes must still fit through the wire."""

from __future__ import annotations

import msgspec

from segue.messages.errors import InvalidRequest


def check_carried(value: object, field: str) -> None:
    """Values travel to the stages in msgpack, whose integers have 64 bits and whose text is UTF-8. Raises
    `InvalidRequest`."""
    try:
        msgspec.msgpack.encode(value)
    except RecursionError as error:
        raise InvalidRequest(f"{field} is nested too deeply", field=field) from error
    except OverflowError as error:
        raise InvalidRequest(f"{field} has a number that is too large: integers have 64 bits", field=field) from error
    except UnicodeEncodeError as error:
        raise InvalidRequest(f"{field} holds half of a surrogate pair: not valid text", field=field) from error
