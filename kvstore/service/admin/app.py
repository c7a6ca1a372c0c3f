"""The application: every resource, behind one gate."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Depends, FastAPI, Request
from fastapi.responses import JSONResponse

import kvstore
from kvstore.runtime.events import Events
from kvstore.service.admin import (
    dashboard_files,
    deletions,
    events,
    gc,
    health,
    history,
    jobs,
    lookup,
    maintenance,
    metrics,
    namespaces,
    pins,
    prefixes,
    quotas,
    requests,
    settings,
    tiers,
    weights,
)
from kvstore.service.admin.access import Access, Reader
from kvstore.service.admin.context import AdminContext
from kvstore.service.admin.gate import Gate
from kvstore.service.admin.parameters import refuse_unknown_parameters
from kvstore.service.admin.problems import Problem, handle_problems

__all__ = ["make_app", "make_routes"]

_TITLE = "kvstore"
_DESCRIPTION = (
    "Looks at and operates a kvstore service. Refusals are `application/problem+json`; times are seconds since the "
    "Unix epoch; a token sees, counts and touches what belongs to its tenant, an operator's all. See docs/admin.md."
)
_RESOURCES = (namespaces, prefixes, lookup, requests, pins, tiers, settings, history, events)
_MANAGEMENT = (deletions, maintenance, quotas, weights, gc, jobs)


def make_app(context: AdminContext, access: Access, told: Events) -> FastAPI:
    """The application, for one server.

    Args:
        context: What the routes work with.
        access: Who may ask.
        told: Of what was changed.
    """
    app = make_routes()
    app.state.admin = context
    app.add_middleware(Gate, access=access, events=told)
    return app


def make_routes() -> FastAPI:
    """All routes and their description, which nothing but this release is needed for."""
    app = FastAPI(
        title=_TITLE,
        version=kvstore.__version__,
        description=_DESCRIPTION,
        license_info={"name": "Apache-2.0", "identifier": "Apache-2.0"},
        dependencies=[Depends(refuse_unknown_parameters)],
        openapi_url=None,  # like everything else it asks for a token, below
        docs_url=None,  # those pages load scripts from elsewhere
        redoc_url=None,
        redirect_slashes=False,
    )
    handle_problems(app)
    app.include_router(health.router)
    app.include_router(metrics.router)
    app.include_router(dashboard_files.router)
    for resource in (*_RESOURCES, *_MANAGEMENT):
        app.include_router(resource.router, prefix="/v1")
    app.include_router(_own, prefix="/v1")
    _describe_problems(app)
    return app


_own = APIRouter(include_in_schema=False)


@_own.get("/openapi.json")
async def openapi(request: Request, grant: Reader) -> JSONResponse:
    """This description."""
    return JSONResponse(request.app.openapi())


def _describe_problems(app: FastAPI) -> None:
    """Put the shape of a refusal into the description, once, for all that refer to it."""
    describe = app.openapi

    def openapi_with_problems() -> dict[str, Any]:
        if app.openapi_schema is None:
            described = describe()
            schemas = described["components"]["schemas"]
            schemas["Problem"] = Problem.model_json_schema()
            for unused in ("HTTPValidationError", "ValidationError"):
                schemas.pop(unused, None)
        return app.openapi_schema or {}

    app.openapi = openapi_with_problems  # type: ignore[method-assign]
