# Copyright 2026 The diffusers_dlo team. Licensed under the Apache License, Version 2.0.
"""Pictures and videos as jobs: what is queued, listed with which settings, and ended; without ranks."""

from __future__ import annotations

from fastapi import FastAPI

from diffusers_dlo.serve.options import Limits, ServeOptions

from .test_app import Client, error_of, with_client


JOBS = "/v1/jobs"


def test_jobs_are_listed_with_what_makes_them_again() -> None:
    async def work(client: Client, app: FastAPI) -> None:
        settings = {
            "prompt": "a fox",
            "size": "64x32",
            "num_inference_steps": 3,
            "guidance_scale": 2.5,
            "flow_shift": 4,
        }
        asked = {**settings, "kind": "video", "n": 2, "num_frames": 9, "fps": 8, "seed": 2**63 - 1}
        videos = (await client.post(JOBS, json=asked)).json()["data"]
        assert [job["settings"]["seed"] for job in videos] == [2**63 - 1, 0]
        assert [job["position"] for job in videos] == [1, 2]
        (picture,) = (await client.post(JOBS, json={"prompt": "a boat", "seed": 5})).json()["data"]
        assert (picture["kind"], picture["status"], picture["position"]) == ("image", "queued", 3)
        assert picture["settings"] == dict.fromkeys(picture["settings"]) | {
            "prompt": "a boat",
            "size": "auto",
            "seed": 5,
        }

        # All of them are jobs, only videos are videos, and those of /v1/videos are both.
        old = (await client.post("/v1/videos", data={"prompt": "old", "num_frames": "5"})).json()
        listed = (await client.get(JOBS)).json()["data"]
        assert [job["id"] for job in listed] == [old["id"], picture["id"], videos[1]["id"], videos[0]["id"]]
        assert listed[3] == videos[0] == (await client.get(f"{JOBS}/{videos[0]['id']}")).json()
        kept = {name: value for name, value in videos[0]["settings"].items() if value is not None}
        assert kept == {**settings, "num_frames": 9, "fps": 8, "seed": 2**63 - 1}
        assert len((await client.get("/v1/videos")).json()["data"]) == 3
        error_of(await client.get(f"/v1/videos/{picture['id']}"), 404)

        # The first is cancelled, which moves the others up, and then forgotten.
        path = f"{JOBS}/{videos[0]['id']}"
        assert error_of(await client.get(f"{path}/content"), 409)["code"] == "not_ready"
        gone = {"id": videos[0]["id"], "object": "job.deleted"}
        assert (await client.delete(path)).json() == {**gone, "deleted": False, "status": "cancelled"}
        assert (await client.get(f"{JOBS}/{picture['id']}")).json()["position"] == 2
        ended = (await client.get(path)).json()
        assert (ended["status"], ended["position"]) == ("cancelled", None) and ended["ended_at"] >= ended["created_at"]
        assert (await client.delete(path)).json() == {**gone, "deleted": True, "status": "cancelled"}
        assert error_of(await client.get(path), 404)["param"] == "job_id"

    with_client(ServeOptions(), work)


def test_a_job_is_refused_with_the_field_that_is_wrong() -> None:
    async def work(client: Client, app: FastAPI) -> None:
        cases = (
            ({"kind": "image", "num_frames": 5}, "num_frames", "is of videos"),
            ({"kind": "image", "fps": 5}, "fps", "is of videos"),
            ({"kind": "video", "num_frames": 34}, "num_frames", "--max-frames"),
            ({"kind": "video", "n": 4}, "n", "--max-n"),
            ({"kind": "image", "n": 4}, "n", "--max-n"),
            ({"kind": "sound"}, "kind", "'kind'"),
            ({"steps": 5}, "steps", "'steps'"),
        )
        for fields, param, said in cases:
            error = error_of(await client.post(JOBS, json={"prompt": "a fox", **fields}), 400)
            assert error["param"] == param and said in error["message"], fields
        assert app.state.service.scheduler.waiting == 0
        # All of a request, or none of it: more than the queue ever holds is the request's fault.
        error = error_of(await client.post(JOBS, json={"prompt": "a fox", "n": 3}), 400)
        assert error["param"] == "n" and "--max-queue" in error["message"]
        assert (await client.post(JOBS, json={"prompt": "a fox"})).status_code == 200
        full = error_of(await client.post(JOBS, json={"prompt": "a fox", "n": 2}), 503)
        assert full["code"] == "queue_full" and len((await client.get(JOBS)).json()["data"]) == 1

    with_client(ServeOptions(limits=Limits(frames=33, n=3, queue=2)), work)
