"""Files that the gateway serves: the page, the sample photos, and Swagger UI."""

from pathlib import Path
from typing import Any

import swagger_ui_bundle
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import FileResponse, HTMLResponse, Response
from starlette.routing import BaseRoute, Mount, Route
from starlette.staticfiles import StaticFiles

from nereid.base.assets import PARCEL_LABEL, SAMPLES

PAGE = Path(__file__).parents[1] / "page"
_SWAGGER = ("swagger-ui.css", "swagger-ui-bundle.js", "favicon-32x32.png")
_DOCS = """<!DOCTYPE html>
<html lang="en">
<meta charset="utf-8">
<title>Nereid: API</title>
<link rel="icon" href="/docs/favicon-32x32.png">
<link rel="stylesheet" href="/docs/swagger-ui.css">
<div id="ui"></div>
<script src="/docs/swagger-ui-bundle.js"></script>
<script type="module" src="/docs/start.js"></script>
</html>
"""
# The bundle is Swagger UI 4, which shows 3.1 documents only if they say that they are 3.0.
_START = """const answer = await fetch("/openapi.json");
const spec = { ...(await answer.json()), openapi: "3.0.3" };
SwaggerUIBundle({ spec, dom_id: "#ui", deepLinking: true });
"""


class Page(StaticFiles):
    """Files that a browser revalidates, so that users see a new release."""

    def file_response(self, *words: Any, **options: Any) -> Response:
        """Return a file that a cache must revalidate."""
        response = super().file_response(*words, **options)
        response.headers["cache-control"] = "no-cache"
        return response


async def docs(request: Request) -> Response:
    """Show the OpenAPI document."""
    return HTMLResponse(_DOCS)


async def docs_file(request: Request) -> Response:
    """Serve a part of Swagger UI."""
    name = request.path_params["name"]
    if name == "start.js":
        return Response(_START, media_type="text/javascript")
    if name not in _SWAGGER:
        raise HTTPException(404)
    return FileResponse(Path(swagger_ui_bundle.swagger_ui_path) / name)


async def sample(request: Request) -> Response:
    """Serve a sample image."""
    for path in (*SAMPLES, PARCEL_LABEL):
        if path.name == request.path_params["name"]:
            return FileResponse(path)
    raise HTTPException(404)


async def index(request: Request) -> Response:
    """Serve the index of the page."""
    return FileResponse(PAGE / "index.html", headers={"cache-control": "no-cache"})


ROUTES: tuple[BaseRoute, ...] = (
    Route("/", index),
    Route("/samples/{name}", sample),
    Route("/docs", docs),
    Route("/docs/{name}", docs_file),
    Mount("/page", Page(directory=PAGE)),
)
