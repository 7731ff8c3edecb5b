"""Jobs of /v1/videos over restarts of the server, beside other folders, and with a full disk."""

from __future__ import annotations

import json
import os
import resource
import shutil
import stat
from pathlib import Path

import numpy as np
import pytest
from filmer import frames
from video_jobs import URL, client_of, content, created, ended, process, serving, until

from segue.messages.errors import ConfigError
from segue.server.openai.videos.store import MAX_ATTEMPTS, VideoStore


def test_a_killed_server_goes_on_where_it_was(tmp_path: Path) -> None:
    """What was done is there; what was not is made again, the same."""
    jobs, door = tmp_path / "jobs", tmp_path / "door"
    with process(jobs) as (server, url), client_of(url) as http:
        done = ended(http, created(http, seed=4)["id"])
        film = http.get(f"{URL}/{done['id']}/content").content
        half = created(http, prompt=f"wait for {door}", seed=5)
        until(http, half["id"], lambda video: video["progress"] == 50)
        server.kill()
        server.wait()
    door.touch()
    with process(jobs) as (server, url), client_of(url) as http:
        assert http.get(f"{URL}/{done['id']}").json() == done
        assert http.get(f"{URL}/{done['id']}/content").content == film
        again = ended(http, half["id"])
        assert (again["status"], again["seed"]) == ("completed", 5)
        assert np.abs(content(http, half["id"]) - frames(5, 17, 32, 48)).max() <= 8


def test_a_stopped_server_leaves_its_jobs_to_the_next(tmp_path: Path) -> None:
    """However often: that it was told to stop is no fault of the job."""
    jobs, door = tmp_path / "jobs", tmp_path / "door"
    with serving(jobs) as server, client_of(server.url) as http:
        video = created(http, prompt=f"wait for {door}", seed=None)
    for _ in range(MAX_ATTEMPTS + 1):
        with serving(jobs) as server, client_of(server.url) as http:
            until(http, video["id"], lambda video: video["progress"] == 50)
    door.touch()
    with serving(jobs) as server, client_of(server.url) as http:
        assert ended(http, video["id"])["status"] == "completed"
        assert server.service.requests[-1].seed == video["seed"]


def test_a_job_that_brings_the_server_down_is_given_up(tmp_path: Path) -> None:
    jobs = tmp_path / "jobs"
    with serving(jobs) as server, client_of(server.url) as http:
        video = created(http, prompt=f"wait for {tmp_path / 'never'}")
    file = jobs / video["id"] / "job.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "attempts": MAX_ATTEMPTS}))
    with serving(jobs) as server, client_of(server.url) as http:
        assert ended(http, video["id"])["error"]["code"] == "interrupted"
        assert not server.service.requests


def test_what_is_half_written_is_not_there(tmp_path: Path) -> None:
    """Folders without their name, files without theirs, and what is not ours."""
    jobs = tmp_path / "jobs"
    with serving(jobs) as server, client_of(server.url) as http:
        video = ended(http, created(http)["id"])
    (jobs / (".new-video_" + "0" * 32)).mkdir()
    (jobs / video["id"] / "video.mp4.part").write_bytes(b"half")
    (jobs / ("video_" + "1" * 32)).mkdir()
    (jobs / "mine").write_text("keep this")
    (jobs / video["id"] / "video.mp4").unlink()
    with serving(jobs) as server, client_of(server.url) as http:
        [listed] = http.get(URL).json()["data"]
        assert (listed["status"], listed["error"]["code"]) == ("failed", "lost")
        assert http.get(f"{URL}/{video['id']}/content").status_code == 404
    assert sorted(path.name for path in jobs.iterdir()) == sorted([".lock", "mine", "video_" + "1" * 32, video["id"]])
    assert not list(jobs.glob("*/*.part"))


def test_folders_that_are_not_what_they_say(tmp_path: Path) -> None:
    """A job under another name, a folder without one, and a link: nothing is served of them, and nothing changed."""
    jobs, other = tmp_path / "jobs", tmp_path / "other"
    with serving(jobs) as server, client_of(server.url) as http:
        video = ended(http, created(http)["id"])
    other.mkdir(mode=0o755)
    (other / "notes.part").write_text("keep this")
    (jobs / ("video_" + "0" * 32)).symlink_to(other)
    shutil.copytree(other, jobs / ("video_" + "2" * 32))
    renamed = jobs / ("video_" + "1" * 32)
    (jobs / video["id"]).rename(renamed)
    with serving(jobs) as server, client_of(server.url) as http:
        assert http.get(URL).json()["data"] == []
        assert http.get(f"{URL}/{video['id']}").status_code == 404
    for kept in (other, jobs / ("video_" + "2" * 32)):
        assert stat.S_IMODE(kept.stat().st_mode) == 0o755
        assert (kept / "notes.part").read_text() == "keep this"
    assert (renamed / "video.mp4").exists()


@pytest.mark.parametrize("request_file", [b"garbage", None])
def test_a_request_that_cannot_be_read_any_more(tmp_path: Path, request_file: bytes | None) -> None:
    with serving(tmp_path) as server, client_of(server.url) as http:
        video = created(http, prompt=f"wait for {tmp_path / 'never'}")
    file = tmp_path / video["id"] / "request"
    file.unlink()
    if request_file is not None:
        file.write_bytes(request_file)
    with serving(tmp_path) as server, client_of(server.url) as http:
        error = ended(http, video["id"])["error"]
    assert error["code"] == "stage_failed"
    assert "can no longer be read" in error["message"]


def test_nobody_else_may_read_them(tmp_path: Path) -> None:
    def mode(path: Path) -> int:
        return stat.S_IMODE(path.stat().st_mode)

    jobs, before = tmp_path / "jobs", os.umask(0)
    try:
        with serving(jobs) as server, client_of(server.url) as http:
            folder = jobs / ended(http, created(http)["id"])["id"]
    finally:
        os.umask(before)
    assert (mode(jobs), mode(folder)) == (0o700, 0o700)
    files = ("job.json", "request", "thumbnail.webp", "video.mp4")
    assert {path.name: mode(path) for path in folder.iterdir()} == dict.fromkeys(files, 0o600)
    folder.chmod(0o755)  # of an earlier server
    VideoStore(jobs, max_jobs=1, max_bytes=1).close()
    assert mode(folder) == 0o700


def test_a_directory_is_one_server_s(tmp_path: Path) -> None:
    with serving(tmp_path), pytest.raises(ConfigError, match="in use by another server"):
        VideoStore(tmp_path, max_jobs=1, max_bytes=1)
    with pytest.raises(ConfigError, match="cannot be used"):
        VideoStore(Path("/proc/nothing"), max_jobs=1, max_bytes=1)


# ── room ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_the_oldest_finished_ones_make_room(tmp_path: Path) -> None:
    with serving(tmp_path / "jobs", max_videos=2) as server, client_of(server.url) as http:
        first, second = (ended(http, created(http)["id"])["id"] for _ in range(2))
        waits = created(http, prompt=f"wait for {tmp_path / 'door'}")["id"]
        assert [video["id"] for video in http.get(URL).json()["data"]] == [waits, second]
        assert http.get(f"{URL}/{first}").status_code == 404
        created(http, prompt=f"wait for {tmp_path / 'door'}")
        refused = http.post(URL, json={"prompt": "one more"})
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "overloaded")
        (tmp_path / "door").touch()
        ended(http, waits)


def test_folders_that_someone_else_took_away(tmp_path: Path) -> None:
    """They stop neither who deletes them nor new ones that need their room."""
    with serving(tmp_path / "jobs", max_videos=2) as server, client_of(server.url) as http:
        first, second = (ended(http, created(http)["id"])["id"] for _ in range(2))
        for video_id in (first, second):
            shutil.rmtree(tmp_path / "jobs" / video_id)
        assert http.get(f"{URL}/{second}/content").status_code == 404
        assert http.delete(f"{URL}/{second}").status_code == 200
        made = [ended(http, created(http)["id"]) for _ in range(2)]
        assert [video["status"] for video in made] == ["completed", "completed"]
        assert http.get(f"{URL}/{first}").status_code == 404


def test_bytes_are_bounded(tmp_path: Path) -> None:
    with serving(tmp_path, max_video_bytes=300_000) as server, client_of(server.url) as http:
        large = {"prompt": "noisy", "size": "128x128"}
        first = ended(http, created(http, **large)["id"])
        second = ended(http, created(http, **large)["id"])
        assert (first["status"], second["status"]) == ("completed", "completed")
        assert [video["id"] for video in http.get(URL).json()["data"]] == [second["id"]]
        third = ended(http, created(http, prompt="noisy", size="256x256")["id"])
        assert third["error"]["code"] == "storage_full"
        assert "300000" in third["error"]["message"]
    assert sum(path.stat().st_size for path in tmp_path.glob("*/*")) <= 300_000


def test_a_full_disk(tmp_path: Path) -> None:
    """Said clearly, nothing half-written served, and what was there before stays."""
    with process(tmp_path) as (server, url), client_of(url) as http:
        before = ended(http, created(http)["id"])["id"]
        resource.prlimit(server.pid, resource.RLIMIT_FSIZE, (30_000, resource.RLIM_INFINITY))
        video = ended(http, created(http, prompt="noisy", size="128x128")["id"])
        assert (video["status"], video["error"]["code"]) == ("failed", "storage_full")
        assert "too large" in video["error"]["message"]
        assert http.get(f"{URL}/{video['id']}/content").status_code == 404
        assert not list((tmp_path / video["id"]).glob("*.mp4*"))
        door = tmp_path / "door"
        waits = created(http, prompt=f"wait for {door}")["id"]
        until(http, waits, lambda video: video["status"] == "in_progress")
        resource.prlimit(server.pid, resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))
        door.touch()
        assert ended(http, waits)["status"] == "failed"
        assert not list((tmp_path / waits).glob("*.part"))
        refused = http.post(URL, json={"prompt": "x"})
        assert (refused.status_code, refused.json()["error"]["code"]) == (507, "storage_full")
        resource.prlimit(server.pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        assert content(http, before).shape == (17, 32, 48, 3)
        assert ended(http, created(http)["id"])["status"] == "completed"
        assert not list(tmp_path.glob(".new*"))
