"""HTTP/2 as h2 parses it, and the cost of its frames, which is known before anything parses them."""

from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.events import ConnectionTerminated, Event
from h2.settings import SettingCodes, Settings
from hyperframe.frame import DataFrame, Frame, GoAwayFrame

# Source: RFC 9113, sections 3.4 and 6.
PREFACE_BYTES, HEAD_BYTES = 24, 9
DATA, HEADERS, CONTINUATION, END_HEADERS = 0, 1, 9, 4
# Shorter frames of a message, and shorter pieces of any frame, cost more than they carry.
MIN_DATA_BYTES, MIN_PIECE_BYTES = 1024, 64
# Encoded headers of one call; decoded ones have a limit of their own.
MAX_BLOCK_BYTES = 2**15
MAX_STREAMS = 256
MAX_HEADER_BYTES = 2**14
# A message of the size of a stream's window arrives without waiting for more.
STREAM_WINDOW, CONNECTION_WINDOW = 2**18, 2**22

# h2 makes the text of each frame for its log, also without one: 40 µs for the hexadecimal digits of 80 kB.
DataFrame._body_repr = lambda frame: ""  # type: ignore[method-assign, assignment]


class HeadersTooLong(Exception):
    """The headers of one call are longer than allowed."""


class FrameCosts:
    """Follow the frames of one connection; `has_partial_headers` says whether headers are still arriving."""

    __slots__ = ("_block_bytes", "_head", "_skipped", "has_partial_headers")

    def __init__(self) -> None:
        self._head, self._skipped, self._block_bytes = b"", PREFACE_BYTES, 0
        self.has_partial_headers = False

    def count(self, data: bytes) -> float:
        """Return the cost of received bytes: 1 for each frame, less for messages in pieces of a usual size.

        Raises:
            HeadersTooLong: headers are longer than allowed.
        """
        cost, at, end = max(0.0, 1 - len(data) / MIN_PIECE_BYTES), self._skipped, len(data)
        while at < end:
            missing = HEAD_BYTES - len(self._head)
            head, at = self._head + data[at : at + missing], at + missing
            if len(head) < HEAD_BYTES:
                self._head, at = head, end
                break
            self._head = b""
            length, kind = int.from_bytes(head[:3]), head[3]
            at += length
            cost += max(0.0, 1 - length / MIN_DATA_BYTES) if kind == DATA else 1
            if kind in (HEADERS, CONTINUATION):
                self._block_bytes += length
                if self._block_bytes > MAX_BLOCK_BYTES:
                    raise HeadersTooLong
                self.has_partial_headers = not head[4] & END_HEADERS
                if not self.has_partial_headers:
                    self._block_bytes = 0
        self._skipped = at - end
        return cost


class Http2(H2Connection):
    """HTTP/2 for as many calls as there are, also after the client has announced its end."""

    # Those whose messages may still be on their way after an early answer.
    MAX_CLOSED_STREAMS = 8 * MAX_STREAMS

    def __init__(self) -> None:
        super().__init__(
            H2Configuration(
                client_side=False,
                header_encoding=None,
                validate_outbound_headers=False,
                normalize_outbound_headers=False,
            )
        )
        self.decoder.max_header_list_size = MAX_HEADER_BYTES
        self.local_settings = Settings(
            client=False,
            initial_values={
                SettingCodes.MAX_CONCURRENT_STREAMS: MAX_STREAMS,
                SettingCodes.MAX_HEADER_LIST_SIZE: MAX_HEADER_BYTES,
                SettingCodes.INITIAL_WINDOW_SIZE: STREAM_WINDOW,
            },
        )

    def _receive_goaway_frame(self, frame: GoAwayFrame) -> tuple[list[Frame], list[Event]]:
        # h2 would close the connection here, and calls in flight would have no answer.
        return [], [ConnectionTerminated()]
