"""The application: every route behind one gate."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Depends, FastAPI, Request
from fastapi.dependencies.utils import get_flat_dependant
from fastapi.responses import JSONResponse
from fastapi.routing import APIRoute

import kvstore
from kvstore.service.admin.access import Access, Reader
from kvstore.service.admin.context import AdminContext
from kvstore.service.admin.gate import Gate
from kvstore.service.admin.jobs import deletions, gc, maintenance
from kvstore.service.admin.jobs.board import JobBoard
from kvstore.service.admin.problems import Problem, Refused, handle_problems, refusals
from kvstore.service.admin.resources import (
    dashboard,
    events,
    hints,
    history,
    jobs,
    lookup,
    namespaces,
    pins,
    plan,
    prefixes,
    query,
    query_by_hash,
    quotas,
    requests,
    service,
    tiers,
    weights,
)

_TITLE = "kvstore"
_DESCRIPTION = (
    "Shows and operates a kvstore service. Errors are `application/problem+json`; times are seconds since the Unix "
    "epoch. A tenant's token sees, counts and changes what belongs to that tenant, an operator's token everything. See "
    "docs/admin.md."
)
_RESOURCES = (
    *(namespaces, prefixes, lookup, query, query_by_hash, plan, hints, requests),
    *(pins, tiers, history, events, quotas, weights, jobs),
)
_OPERATIONS = (deletions, maintenance, gc)


def make_app(context: AdminContext, jobs: JobBoard) -> FastAPI:
    """The application of one server."""
    app = make_routes()
    app.state.admin, app.state.jobs = context, jobs
    app.add_middleware(Gate, access=Access(context.service.credentials), events=context.service.store.events)
    return app


def make_routes() -> FastAPI:
    """All routes and their description, which depends on the release alone."""
    app = FastAPI(
        title=_TITLE,
        version=kvstore.__version__,
        description=_DESCRIPTION,
        license_info={"name": "Apache-2.0", "identifier": "Apache-2.0"},
        dependencies=[Depends(_refuse_unknown_parameters)],
        openapi_url=None,  # like every other route it needs a token, below
        docs_url=None,  # those pages load scripts from other hosts
        redoc_url=None,
        redirect_slashes=False,
    )
    handle_problems(app)
    app.include_router(service.health)
    app.include_router(dashboard.router)
    common = refusals(401, 403, 422, 429, 503)
    for module in (*_RESOURCES, service, *_OPERATIONS):
        app.include_router(module.router, prefix="/v1", responses=common)
    app.include_router(_description, prefix="/v1")
    _describe_problems(app)
    return app


async def _refuse_unknown_parameters(request: Request) -> None:
    """A dependency of every route: refuse a parameter that the route does not have, or that is given twice."""
    route = request.scope.get("route")
    fields = get_flat_dependant(route.dependant).query_params if isinstance(route, APIRoute) else []
    known = {field.alias for field in fields}
    given = [name for name, _ in request.query_params.multi_items()]
    for name in given:
        if name not in known:
            expected = f"one of {', '.join(sorted(known))}" if known else "none"
            raise Refused(422, "unknown parameter", field=f"query.{name}"[:100], expected=expected, seen=name)
        if given.count(name) > 1:
            raise Refused(422, "a parameter is given twice", field=f"query.{name}", expected="once")


_description = APIRouter(include_in_schema=False)


@_description.get("/openapi.json")
async def openapi(request: Request, grant: Reader) -> JSONResponse:
    """This description."""
    return JSONResponse(request.app.openapi())


def _describe_problems(app: FastAPI) -> None:
    """Add the schema of an error to the description once; every route refers to it."""
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
