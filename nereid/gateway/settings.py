"""Settings of a gateway, and the options of its program."""

import ipaddress
from dataclasses import dataclass
from pathlib import Path

from nereid.base.contract import HTTP_PORT, MAX_IMAGE_BYTES
from nereid.base.task_registry import DEFAULT_TASK
from nereid.base.tracing.records import DEFAULT_SAMPLING, Sampling

LOOPBACK_NAMES = ("localhost", "127.0.0.1", "::1")
# Load balancers keep idle connections for about 60 s. If the gateway closed one first, a request could arrive
# just then, and its caller would get a 502.
KEEP_ALIVE_S = 90


@dataclass(frozen=True, slots=True)
class GatewaySettings:
    """Address, upstream server, access rules and limits of a gateway.

    Attributes:
        url: Triton's HTTP address, HOST:PORT or `unix:PATH`.
        model: the default model: a route, or another model of any task.
        host: address to listen on; if no key is needed, only loopback names are valid in `Host`.
        keys_needed: whether operations that change nothing need a key on loopback too; elsewhere they do.
        allowed_hosts: additional names that are valid in `Host`; if keys are needed, () allows any name.
        cors_origins: origins of pages that may call the gateway, such as `https://photos.example`.
        rate_per_s: quota per key in images per second; None for no limit. A key may have its own.
        burst: images that a key may send at once.
        max_body_bytes: limit per request.
        max_buffered_bytes: limit for all requests together.
        max_pixels: limit per image, as declared by its structure.
        max_images: limit per batch.
        traces: socket of the server's trace collector; "" for none.
        sampling: which traces to keep.
        max_in_flight: upper bound of the adaptive limit; a route rejects more than 64.
    """

    url: str = f"127.0.0.1:{HTTP_PORT}"
    model: str = DEFAULT_TASK.model
    host: str = "127.0.0.1"
    keys_needed: bool = False
    allowed_hosts: tuple[str, ...] = ()
    cors_origins: tuple[str, ...] = ()
    rate_per_s: float | None = None
    burst: int = 10
    max_body_bytes: int = MAX_IMAGE_BYTES
    max_buffered_bytes: int = 256 * 2**20
    max_pixels: int = 64_000_000
    max_side_px: int = 16_384
    max_images: int = 16
    default_timeout_s: float = 10.0
    max_timeout_s: float = 60.0
    max_in_flight: int = 64
    traces: str = ""
    sampling: Sampling = DEFAULT_SAMPLING

    def __post_init__(self) -> None:
        for name in GatewaySettings.__slots__:
            value = getattr(self, name)
            if isinstance(value, int | float) and not isinstance(value, bool) and not value > 0:
                raise ValueError(f"{name} must be more than 0, got {value}")
        if self.default_timeout_s > self.max_timeout_s:
            raise ValueError(
                f"default_timeout_s must be at most max_timeout_s, {self.max_timeout_s:g}, "
                f"got {self.default_timeout_s:g}"
            )
        for origin in self.cors_origins:
            scheme, mark, rest = origin.partition("://")
            if not (scheme in ("http", "https") and mark and rest) or {*rest} & {*"/*"}:
                raise ValueError(f"CORS origin: expected one such as https://photos.example, got {origin!r}")

    @property
    def is_on_loopback(self) -> bool:
        """Return whether only this machine can reach the gateway."""
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False

    @property
    def requires_keys(self) -> bool:
        """Return whether operations that change nothing need a key."""
        return self.keys_needed or not self.is_on_loopback

    @property
    def hosts(self) -> frozenset[str]:
        """Valid names in `Host`, without port; empty allows any name."""
        default_hosts = () if self.requires_keys else (*LOOPBACK_NAMES, self.host)
        return frozenset(name.lower() for name in (*default_hosts, *self.allowed_hosts))


@dataclass(frozen=True, slots=True)
class GatewayOptions(GatewaySettings):
    """The settings of a gateway that is a program of its own; `url` and `model` may be replaced.

    Attributes:
        repository: the models of its server; None for a server elsewhere, at `url`.
        models: names of the models that it offers first.
        keys: file with the keys of its callers; None for the default file.
        port: HTTP port; 0 for a free one.
        grpc_port: port of the v2 protocol over gRPC; 0 for a free one, None for no such port.
        certificate, certificate_key: PEM files, which enable TLS; the key may be in the certificate's.
        keep_alive_s: idle connection timeout.
        workers: number of processes that listen on the same ports.
        logs_requests: whether each request is logged on stderr, not only failures.
    """

    repository: Path | None = None
    models: tuple[str, ...] = ()
    keys: Path | None = None
    port: int = 0
    grpc_port: int | None = None
    certificate: Path | None = None
    certificate_key: Path | None = None
    keep_alive_s: int = KEEP_ALIVE_S
    workers: int = 1
    logs_requests: bool = False
