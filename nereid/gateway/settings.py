"""What a gateway is told when it starts."""

import ipaddress
from dataclasses import dataclass

from nereid.contract import GRPC_PORT, MAX_IMAGE_BYTES

LOOPBACK_NAMES = ("localhost", "127.0.0.1", "::1")


@dataclass(frozen=True, slots=True)
class Settings:
    """Where the gateway listens, whom it asks, and what it lets in.

    Attributes:
        url: HOST:PORT of Triton's gRPC.
        model: a route, or any model that a classifier can ask.
        host: what the gateway listens on; on loopback it answers to loopback's names only.
        keys_needed: classifying and looking need an API key also on loopback; beyond it they always do.
        allowed_hosts: names that a request's `Host` may have beside those; beyond loopback, () is for any.
        cors_origins: pages of these origins may call, such as `https://photos.example`.
        rate_per_s: images of one key; None is for no limit. A key may have its own.
        burst: how many of them may come at once.
        max_body_bytes: of one request.
        max_buffered_bytes: of all requests at once.
        max_pixels: of one image, as its header says.
        max_images: of one batch.
        most_in_flight: bound of the adaptive limit; a route refuses more than 64.
    """

    url: str = f"127.0.0.1:{GRPC_PORT}"
    model: str = "classify"
    host: str = "127.0.0.1"
    keys_needed: bool = False
    allowed_hosts: tuple[str, ...] = ()
    cors_origins: tuple[str, ...] = ()
    rate_per_s: float | None = None
    burst: int = 10
    max_body_bytes: int = MAX_IMAGE_BYTES
    max_buffered_bytes: int = 512 * 2**20
    max_pixels: int = 64_000_000
    max_side_px: int = 16_384
    max_images: int = 16
    default_timeout_s: float = 10.0
    max_timeout_s: float = 60.0
    most_in_flight: int = 64

    def __post_init__(self) -> None:
        positive = {
            name: getattr(self, name)
            for name in self.__slots__
            if isinstance(getattr(self, name), int | float) and name != "keys_needed"
        }
        for name, value in positive.items():
            if not value > 0:
                raise ValueError(f"{name} must be more than 0, got {value}")
        if self.default_timeout_s > self.max_timeout_s:
            raise ValueError(
                f"default_timeout_s must be at most max_timeout_s, {self.max_timeout_s:g}, "
                f"got {self.default_timeout_s:g}"
            )
        for origin in self.cors_origins:
            scheme, mark, rest = origin.partition("://")
            if not (scheme in ("http", "https") and mark and rest) or {*rest} & {*"/*"}:
                raise ValueError(f"a CORS origin is like https://photos.example, got {origin!r}")

    @property
    def is_on_loopback(self) -> bool:
        """Tell whether only this machine can reach the gateway."""
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False

    @property
    def asks_for_keys(self) -> bool:
        """Tell whether classifying and looking need a key."""
        return self.keys_needed or not self.is_on_loopback

    @property
    def hosts(self) -> frozenset[str]:
        """The names a request's `Host` may have, without port; empty is for any."""
        own = (*LOOPBACK_NAMES, self.host) if self.is_on_loopback else ()
        return frozenset(name.lower() for name in (*own, *self.allowed_hosts))
