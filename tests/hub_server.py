"""A stand-in for the Hub on 127.0.0.1: as much of its HTTP API as publishing uses, kept in memory, with faults on demand."""

import base64
import hashlib
import json
import re
import threading
from collections import Counter
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

TOKEN = "hf_SecretTokenThatMustNotLeak42"


class StandInHub:
    """Repositories (`name -> {"private", "files", "commits"}`), LFS objects, a log of requests, and faults.

    Faults: `drop_uploads` / `drop_commits` close that many connections in the middle of such a request; `fail` maps "METHOD path-regex"
    to a status that is answered instead; `at_request` is called with every "METHOD path" first.
    """

    def __init__(self):
        self.repos: dict[str, dict] = {}
        self.objects: dict[str, bytes] = {}
        self.requests: list[str] = []
        self.uploads: Counter = Counter()
        self.drop_uploads = self.drop_commits = 0
        self.fail: dict[str, int] = {}
        self.at_request: Callable[[str], None] | None = None
        self.readonly_token = False
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self._server.daemon_threads = True
        self.endpoint = f"http://127.0.0.1:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self):
        self._server.shutdown()
        self._server.server_close()

    def put(self, repo: str, private: bool = True, **files: bytes):
        self.repos[repo] = {"private": private, "files": {".gitattributes": b"", **files}, "commits": []}

    def text(self, repo: str) -> dict[str, str]:
        return {name: data.decode(errors="replace") for name, data in self.repos[repo]["files"].items()}


def _handler(hub: StandInHub):
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *args):
            pass

        def do_GET(self):
            self._handle("GET")

        def do_POST(self):
            self._handle("POST")

        def do_PUT(self):
            self._handle("PUT")

        def do_HEAD(self):
            self._handle("HEAD")

        def _answer(self, status, content=None, headers=()):
            body = (
                content if isinstance(content, bytes) else json.dumps(content if content is not None else {}).encode()
            )
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            for name, value in headers:
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

        def _drop(self):
            self.close_connection = True
            self.connection.close()

        def _handle(self, method):
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            path = self.path.split("?")[0]
            if path.startswith(
                ("/api/telemetry", "/api/agent-harnesses")
            ):  # the client's own curiosity, no part of publishing
                return self._answer(200)
            hub.requests.append(f"{method} {path}")
            if hub.at_request is not None:
                hub.at_request(f"{method} {path}")
            for pattern, status in hub.fail.items():
                if re.fullmatch(pattern, f"{method} {path}"):
                    return self._answer(
                        status, {"error": f"refused, as the test asked, for {self.headers.get('Authorization')}"}
                    )
            if path.startswith("/lfs/"):
                return self._upload(path, body)
            if self.headers.get("Authorization") != f"Bearer {TOKEN}":
                return self._answer(401, {"error": "Invalid username or password."})
            for pattern, route in ROUTES:
                match = re.fullmatch(pattern, f"{method} {path}")
                if match:
                    return route(self, body, *match.groups())
            return self._answer(404, {"error": f"the stand-in has no {method} {path}"})

        def _repo(self, name, revision=None):
            repo = hub.repos.get(name)
            if repo is None:
                self._answer(404, {"error": "Repository not found"}, [("X-Error-Code", "RepoNotFound")])
            elif revision not in (None, "main", *repo.get("branches", ())) and not re.fullmatch(
                "[0-9a-f]{40}", revision
            ):
                repo = self._answer(
                    404, {"error": f"Invalid rev id: {revision}"}, [("X-Error-Code", "RevisionNotFound")]
                )
            return repo

        def branch(self, body, name, branch):
            if (repo := self._repo(name)) is None:
                return
            if branch in repo.setdefault("branches", []):
                return self._answer(409, {"error": "Reference already exists"})
            repo["branches"].append(branch)
            self._answer(200)

        def create(self, body):
            asked = json.loads(body)
            name = f"{asked.get('organization') or 'tester'}/{asked['name']}"
            if name.startswith("stranger/") or hub.readonly_token:
                return self._answer(403, {"error": "You don't have the rights to create a model here"})
            if name in hub.repos:
                return self._answer(
                    409, {"error": "You already created this model repo", "url": f"{hub.endpoint}/{name}"}
                )
            hub.put(name, bool(asked.get("private") or asked.get("visibility") == "private"))
            return self._answer(200, {"url": f"{hub.endpoint}/{name}", "name": name})

        def info(self, body, name, revision=None):
            if (repo := self._repo(name, revision)) is None:
                return
            siblings = [{"rfilename": file} for file in repo["files"]]
            sha = f"{len(repo['commits']):040x}"
            self._answer(
                200, {"id": name, "modelId": name, "private": repo["private"], "sha": sha, "siblings": siblings}
            )

        def tree(self, body, name, revision):
            if (repo := self._repo(name, revision)) is None:
                return
            files = [
                {"type": "file", "path": path, "size": len(data), "oid": "0"} for path, data in repo["files"].items()
            ]
            self._answer(200, files)

        def validate(self, body):
            self._answer(200, {"errors": [], "warnings": []})

        def preupload(self, body, name, revision):
            if (repo := self._repo(name, revision)) is None:
                return
            files = []
            for file in json.loads(body)["files"]:
                lfs = file["path"].endswith((".safetensors", ".png"))
                data = repo["files"].get(file["path"])
                answer = {"path": file["path"], "uploadMode": "lfs" if lfs else "regular", "shouldIgnore": False}
                if data is not None:
                    git = hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
                    answer["oid"] = hashlib.sha256(data).hexdigest() if lfs else git
                files.append(answer)
            self._answer(200, {"files": files})

        def batch(self, body, name):
            asked = json.loads(body)
            objects = []
            for item in asked["objects"]:
                entry = {"oid": item["oid"], "size": item["size"]}
                if item["oid"] not in hub.objects:
                    entry["actions"] = {"upload": {"href": f"{hub.endpoint}/lfs/{item['oid']}", "header": {}}}
                objects.append(entry)
            self._answer(200, {"transfer": "basic", "objects": objects})

        def _upload(self, path, body):
            if hub.drop_uploads > 0:
                hub.drop_uploads -= 1
                return self._drop()
            oid = path.rsplit("/", 1)[1]
            if hashlib.sha256(body).hexdigest() != oid:
                return self._answer(400, {"error": "wrong content"})
            hub.objects[oid] = body
            hub.uploads[oid] += 1
            return self._answer(200)

        def commit(self, body, name, revision):
            if (repo := self._repo(name, revision)) is None:
                return
            if hub.drop_commits > 0:
                hub.drop_commits -= 1
                return self._drop()
            changed = dict(repo["files"])
            for line in body.decode().splitlines():
                entry = json.loads(line)
                value = entry["value"]
                if entry["key"] == "file":
                    changed[value["path"]] = base64.b64decode(value["content"])
                elif entry["key"] == "lfsFile":
                    changed[value["path"]] = hub.objects[value["oid"]]
                elif entry["key"] == "deletedFile":
                    del changed[value["path"]]
            repo["files"] = changed
            repo["commits"].append(body)
            oid = f"{len(repo['commits']):040x}"
            self._answer(200, {"success": True, "commitOid": oid, "commitUrl": f"{hub.endpoint}/{name}/commit/{oid}"})

        def resolve(self, body, name, revision, file):
            if (repo := self._repo(name, revision)) is None:
                return
            data = repo["files"].get(file)
            if data is None:
                return self._answer(404, {"error": "Entry not found"}, [("X-Error-Code", "EntryNotFound")])
            headers = [
                ("ETag", f'"{hashlib.sha1(data).hexdigest()}"'),
                ("X-Repo-Commit", f"{len(repo['commits']):040x}"),
            ]
            return self._answer(200, data, headers)

    name = r"([\w.-]+/[\w.-]+)"
    ROUTES = [
        (r"POST /api/repos/create", Handler.create),
        (r"POST /api/validate-yaml", Handler.validate),
        (rf"GET /api/models/{name}", Handler.info),
        (rf"GET /api/models/{name}/revision/([\w.-]+)", Handler.info),
        (rf"GET /api/models/{name}/tree/([\w.-]+)", Handler.tree),
        (rf"POST /api/models/{name}/branch/([\w.-]+)", Handler.branch),
        (rf"POST /api/models/{name}/preupload/([\w.-]+)", Handler.preupload),
        (rf"POST /{name}\.git/info/lfs/objects/batch", Handler.batch),
        (rf"POST /api/models/{name}/commit/([\w.-]+)", Handler.commit),
        (rf"(?:GET|HEAD) /{name}/resolve/([\w.-]+)/(.+)", Handler.resolve),
    ]
    return Handler
