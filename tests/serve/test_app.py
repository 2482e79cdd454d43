# Copyright 2026 The diffusers_dlo team. Licensed under the Apache License, Version 2.0.
"""The server as it is before its ranks are there: requests are checked, wait, time out, are cancelled, or refused."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any

import httpx
import hypothesis
import pytest
import schemathesis
import uvicorn
from fastapi import FastAPI

from diffusers_dlo.serve.app import make_app
from diffusers_dlo.serve.options import Limits, ServeOptions


IMAGES = "/v1/images/generations"
JSON = {"content-type": "application/json"}
Client = httpx.AsyncClient


def with_client(options: ServeOptions, work: Callable[[Client, FastAPI], Awaitable[None]]) -> None:
    """Runs `work` against the application in this process; its ranks are not started."""

    async def run() -> None:
        app = make_app(options)
        transport = httpx.ASGITransport(app=app)
        async with Client(transport=transport, base_url="http://127.0.0.1:8000", timeout=20) as client:
            await asyncio.wait_for(work(client, app), 60)

    asyncio.run(run())


def error_of(response: httpx.Response, status: int) -> dict[str, Any]:
    """The error in OpenAI's form."""
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"} and error["message"]
    return error


def test_it_runs_before_it_is_ready() -> None:
    async def work(client: Client, app: FastAPI) -> None:
        assert (await client.get("/health")).json() == {"status": "ok", "reason": ""}
        ready = await client.get("/ready")
        assert (ready.status_code, ready.json()["status"]) == (503, "starting") and "retry-after" in ready.headers
        models = (await client.get("/v1/models")).json()
        assert [model["id"] for model in models["data"]] == ["tiny"]
        assert "diffusers_dlo_ready 0.0\n" in (await client.get("/metrics")).text

    with_client(ServeOptions(name="tiny"), work)


def test_a_request_waits_until_its_deadline_and_a_full_queue_says_when_to_come_again() -> None:
    async def work(client: Client, app: FastAPI) -> None:
        first = [
            asyncio.create_task(client.post(IMAGES, json={"prompt": "a fox", "n": n, "timeout": 0.6})) for n in (2, 1)
        ]
        await asyncio.sleep(0.2)
        assert app.state.service.scheduler.waiting == 3
        # All of a request, or none of it.
        refused = await client.post(IMAGES, json={"prompt": "a fox", "n": 2})
        assert error_of(refused, 503)["code"] == "queue_full" and int(refused.headers["retry-after"]) >= 1
        assert app.state.service.scheduler.waiting == 3
        last = asyncio.create_task(client.post(IMAGES, json={"prompt": "a fox"}))
        for response in await asyncio.gather(*first):
            error = error_of(response, 504)
            assert error["code"] == "deadline_exceeded" and "0.6 s" in error["message"]
        assert app.state.service.scheduler.waiting == 1, "what has timed out still waits for a rank"
        assert 'jobs_total{code="deadline_exceeded",kind="image",status="failed"} 3' in app_metrics(app)
        # The end of the server fails what waits, and refuses what comes.
        app.state.service.scheduler.close()
        assert error_of(await last, 503)["code"] == "shutting_down"
        assert error_of(await client.post(IMAGES, json={"prompt": "a fox"}), 503)["code"] == "shutting_down"

    with_client(ServeOptions(limits=Limits(queue=4)), work)


def app_metrics(app: FastAPI) -> str:
    service = app.state.service
    return service.metrics.page(service.scheduler).decode()


def test_a_job_is_told_of_cancelled_and_forgotten() -> None:
    async def work(client: Client, app: FastAPI) -> None:
        made = await client.post("/v1/videos", files={"prompt": (None, "a boat"), "num_frames": (None, "9")})
        job = made.json()
        assert (job["status"], job["progress"], job["seconds"], job["model"]) == ("queued", 0, "0.375", "demo")
        path = f"/v1/videos/{job['id']}"
        assert (await client.get(path)).json() == job
        assert error_of(await client.get(f"{path}/content"), 409)["code"] == "not_ready"
        listening = asyncio.create_task(client.get(f"{path}/events"))
        await asyncio.sleep(0.1)
        gone = (await client.delete(path)).json()
        assert gone == {"id": job["id"], "object": "video.deleted", "deleted": False, "status": "cancelled"}
        events = [line for line in (await listening).text.splitlines() if line]
        assert events[0] == "event: queued" and events[-2] == "event: cancelled"
        assert json.loads(events[-1].removeprefix("data: "))["status"] == "cancelled"
        assert app.state.service.scheduler.waiting == 0
        assert (await client.delete(path)).json()["deleted"] is True
        assert error_of(await client.get(path), 404)["code"] == "not_found"

        # The last that have ended are kept, and all that have not.
        names = [(await client.post("/v1/videos", data={"prompt": f"boat {i}"})).json()["id"] for i in range(4)]
        for name in names[:3]:
            await client.delete(f"/v1/videos/{name}")
        names.append((await client.post("/v1/videos", data={"prompt": "one more"})).json()["id"])
        kept = [job["id"] for job in (await client.get("/v1/videos")).json()["data"]]
        assert kept == [names[4], names[3], names[2]]

    with_client(ServeOptions(keep=1), work)


def test_what_is_wrong_is_said_in_the_form_of_openai() -> None:
    async def work(client: Client, app: FastAPI) -> None:
        unknown = error_of(await client.post(IMAGES, json={"prompt": "a fox", "stepps": 3}), 400)
        assert (unknown["param"], unknown["type"]) == ("stepps", "invalid_request_error")
        assert error_of(await client.post(IMAGES, json={}), 400)["param"] == "prompt"
        assert error_of(await client.post(IMAGES, content=b"{", headers={"content-type": "application/json"}), 400)
        limit = error_of(await client.post(IMAGES, json={"prompt": "a fox", "num_inference_steps": 101}), 400)
        assert (limit["param"], limit["code"]) == ("num_inference_steps", "limit")
        assert limit["message"] == "'num_inference_steps' asks for 101; this server allows 100 (--max-steps)."
        assert error_of(await client.post(IMAGES, json={"prompt": "a", "model": "dall-e-3"}), 404)["param"] == "model"
        form = error_of(await client.post("/v1/videos/sync", data={"prompt": "a boat", "num_frames": "x"}), 400)
        assert form["param"] == "num_frames"
        broken = error_of(await client.post(IMAGES, content=b'{"n": 1,', headers=JSON), 400)
        assert (broken["param"], broken["code"]) == (None, "json_invalid")
        assert error_of(await client.get("/nowhere"), 404)
        assert error_of(await client.get(IMAGES), 405)
        assert error_of(await client.get("/v1/videos/..%2f..%2fetc%2fpasswd/content"), 404)

    with_client(ServeOptions(), work)


def test_text_that_is_no_unicode_and_numbers_of_any_length_are_refused() -> None:
    fields = {
        **dict.fromkeys(("prompt", "negative_prompt", "model", "user", "quality", "moderation"), r'"\ud800"'),
        r"\ud800": "1",
        "extra_params": r'{"\ud800": 1}',
        "seed": "1" + "0" * 400,
    }
    extras = (r'{"eta": "\ud800"}', r'{"\ud800": []}', '{"eta": 1%s}' % ("0" * 400), '{"eta": -1%s}' % ("0" * 400))

    async def work(client: Client, app: FastAPI) -> None:
        for name, value in fields.items():
            first = "" if name == "prompt" else '"prompt": "a", '
            body = f'{{{first}"timeout": 0.02, "{name}": {value}}}'
            error_of(await client.post(IMAGES, content=body.encode(), headers=JSON), 400)
        for extra in extras:
            body = f'{{"prompt": "a", "timeout": 0.02, "extra_params": {extra}}}'
            refused = error_of(await client.post(IMAGES, content=body.encode(), headers=JSON), 400)
            assert refused["param"] == "extra_params" and "'extra_params'" in refused["message"]
            form = {"prompt": "a", "timeout": "0.02", "extra_params": extra}
            assert error_of(await client.post("/v1/videos", data=form), 400)["param"] == "extra_params"
        assert app.state.service.scheduler.waiting == 0 and not list(app.state.service.book)

    with_client(ServeOptions(), work)


def test_more_pictures_than_ever_wait_are_no_matter_of_time() -> None:
    async def work(client: Client, app: FastAPI) -> None:
        refused = error_of(await client.post(IMAGES, json={"prompt": "a fox", "n": 3}), 400)
        assert refused["param"] == "n" and refused["message"].endswith("allows 2 (--max-queue).")

    with_client(ServeOptions(limits=Limits(queue=2)), work)


def test_a_key_opens_everything_but_the_state() -> None:
    async def work(client: Client, app: FastAPI) -> None:
        keys = ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "Basic secret"}, {"Authorization": "secret"})
        for headers in keys:
            refused = await client.get("/v1/models", headers=headers)
            assert error_of(refused, 401)["code"] == "invalid_api_key"
            assert refused.headers["www-authenticate"] == "Bearer"
        assert (await client.get("/v1/models", headers={"Authorization": "bearer secret"})).status_code == 200
        for path, status in (("/health", 200), ("/ready", 503), ("/metrics", 401), ("/openapi.json", 401)):
            assert (await client.get(path)).status_code == status
        # With a key, names and pages do not matter.
        named = {"Authorization": "Bearer secret", "Host": "gpu.example", "Origin": "https://other.example"}
        assert (await client.get("/v1/models", headers=named)).status_code == 200

    with_client(ServeOptions(api_key="secret"), work)


def test_pages_of_other_sites_are_refused_on_this_machine() -> None:
    async def work(client: Client, app: FastAPI) -> None:
        hosts = ("evil.example", "", "[", "127.0.0.1.evil.example", "128.0.0.1")
        origins = ("http://evil.example", "null", "http://[", "http://127.0.0.1", "http://a@127.0.0.1:8000")
        for headers in (*({"Host": host} for host in hosts), *({"Origin": origin} for origin in origins)):
            assert error_of(await client.get("/v1/models", headers=headers), 403)["code"] == "wrong_host"
        own = (
            {"Host": "localhost:8000"},
            {"Host": "127.0.0.2"},
            {"Host": "[::1]:8000"},
            {"Origin": "http://127.0.0.1:8000"},
        )
        for headers in own:
            assert (await client.get("/v1/models", headers=headers)).status_code == 200

    with_client(ServeOptions(), work)
    with_client(ServeOptions(host="127.0.0.2"), work)


def test_a_body_is_bounded_whether_it_says_its_length_or_not() -> None:
    async def chunks() -> AsyncIterator[bytes]:
        yield b'{"prompt": "'
        for _ in range(20):
            yield b"a" * 100
        yield b'"}'

    async def work(client: Client, app: FastAPI) -> None:
        assert error_of(await client.post(IMAGES, json={"prompt": "a" * 1000}), 413)
        assert error_of(await client.post(IMAGES, content=chunks(), headers={"content-type": "application/json"}), 413)
        assert error_of(await client.post("/v1/videos", files={"prompt": ("name", b"a" * 1000)}), 413)
        assert error_of(await client.post(IMAGES, json={"prompt": "a", "timeout": 0.05}), 504)

    with_client(ServeOptions(limits=Limits(body=1000)), work)


@contextlib.contextmanager
def listening(app: FastAPI) -> Iterator[str]:
    """The application behind a real socket, without its lifespan."""
    server = uvicorn.Server(uvicorn.Config(app, lifespan="off", log_level="warning"))
    with socket.socket() as own:
        own.bind(("127.0.0.1", 0))
        own.listen()  # so that nobody is refused before the thread has begun
        thread = threading.Thread(target=server.run, args=([own],))
        thread.start()
        try:
            yield f"http://127.0.0.1:{own.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join()


@pytest.mark.parametrize("examples", (12, pytest.param(150, marks=pytest.mark.slow)), ids=("few", "many"))
def test_no_field_of_any_request_is_an_error_of_the_server(examples: int) -> None:
    # What is valid waits for its deadline: there are no ranks.
    app = make_app(ServeOptions(limits=Limits(seconds=0.02, queue=10_000)))
    schema = schemathesis.openapi.from_dict(app.openapi())
    fuzzed = set()
    with listening(app) as address:
        for found in schema.exclude(path="/v1/events").get_all_operations():
            operation = found.ok()

            @hypothesis.settings(
                max_examples=examples, deadline=None, database=None, suppress_health_check=list(hypothesis.HealthCheck)
            )
            @hypothesis.seed(0)
            @hypothesis.given(case=operation.as_strategy())
            def fuzz(case: Any) -> None:
                response = case.call(base_url=address)
                assert response.status_code in (200, 400, 404, 405, 413, 503, 504), response.text
                fuzzed.add((case.operation.label, response.status_code))

            fuzz()
    answers = {status for label, status in fuzzed if label == f"POST {IMAGES}"}
    assert answers >= {504}, "no valid request was among them"
    assert len({label for label, _ in fuzzed}) == 17
