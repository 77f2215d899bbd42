"""The admin server in this process, without a network."""

import asyncio
from types import SimpleNamespace

import httpx
import pytest

from ackstate.analysis.admin.app import create_app


class InProcess:
    """Sends requests to an application without a network."""

    def __init__(self, app):
        self.app = app

    def __call__(self, method, path, *, json=None, **options):
        async def ask():
            transport = httpx.ASGITransport(self.app, raise_app_exceptions=False)
            async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1", trust_env=False) as client:
                if json is not None:
                    options["json"] = json
                return await client.request(method, path, **options)

        return asyncio.run(ask())


class Standing:
    """Stands for a store, or a part of one, that each test replaces: an application takes a while to make."""

    def __init__(self, find):
        self._find = find

    def __getattr__(self, name):
        return getattr(self._find(), name)


def standing_for(current):
    """Return a store that stands for the one that `current` names."""
    standing = Standing(lambda: current["store"])
    parts = {name: Standing(lambda name=name: getattr(standing, name)) for name in ("metadata", "ledgers")}
    return SimpleNamespace(**parts)


@pytest.fixture(scope="session")
def standing_store():
    return standing_for


@pytest.fixture(scope="session")
def shared():
    """The store of the test that runs, and an application on it with Pulsar's defaults and without a token."""
    current = {}
    return current, InProcess(create_app(standing_for(current)))


@pytest.fixture
def ask(shared, store):
    """Requests to the server with Pulsar's defaults, without a token."""
    shared[0]["store"] = store
    return shared[1]


@pytest.fixture
def ask_with(store):
    """Make requests to a server with other settings."""
    return lambda **settings: InProcess(create_app(store, **settings))


@pytest.fixture(scope="session")
def in_process():
    """Make requests to an application."""
    return InProcess
