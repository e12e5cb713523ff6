"""`POST /v1/preview`: a picture of what the network sees of an image."""

import asyncio

from nereid.gateway import image_size
from nereid.gateway.failures import Failure
from nereid.gateway.http.http_request import GatewayRequest, GatewayResponse
from nereid.gateway.models import PreviewRefused
from nereid.gateway.state import Gateway
from nereid.vision.imaging.formats.size import read_size
from nereid.vision.imaging.formats.work import work_of


async def preview(gateway: Gateway, request: GatewayRequest) -> GatewayResponse:
    """Return a picture (PNG) of an image as the network sees it."""
    settings = gateway.settings
    left_s = request.start_timeout(settings.default_timeout_s, settings.max_timeout_s)
    image = await gateway.uploads.one(request, left_s)
    size = read_size(image)
    image_size.check(size, settings.max_pixels, settings.max_side_px)
    work = work_of(size, settings.max_pixels)
    gateway.quotas.take(request.key, work - 1, is_debt=True)
    # One at a time, to its end: decoding costs as much as an inference, and predictions come first.
    slot = await gateway.previewing.take(request.left_s(), request.owner, [work], request.model.name)

    def end(preparing: "asyncio.Task[bytes | None]") -> None:
        is_answered = preparing.exception() is None
        gateway.quotas.take(request.key, slot.measure(is_answered), is_debt=True)
        slot.release()

    def prepare() -> bytes | None:
        return gateway.models.preview(request.model.name, bytes(image))

    preparing = asyncio.create_task(asyncio.to_thread(prepare))
    preparing.add_done_callback(end)
    try:
        async with asyncio.timeout(request.left_s()):
            png = await asyncio.shield(preparing)
    except TimeoutError:
        raise request.late() from None
    except PreviewRefused as error:
        raise Failure("invalid_image", str(error)) from None
    if png is None:
        raise Failure("not_found", f"this gateway does not know the preprocessing of '{request.model.name}'")
    return GatewayResponse(png, b"image/png", headers=[(b"cache-control", b"no-store")])
