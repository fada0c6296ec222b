"""A stand-in for the Hub on 127.0.0.1: the HTTP API that publishing uses, in memory, with faults on demand."""

import base64
import hashlib
import json
import re
import threading
from collections import Counter
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

TOKEN = "hf_SecretTokenThatMustNotLeak42"
REPO = "tester/model"


class StandInHub:
    """Repositories (`name -> {"private", "files", "commits"}`), LFS objects, a log of requests, and faults.

    Faults: `drop_uploads` / `drop_commits` close that many connections inside such a request; `fail` maps
    "METHOD path-regex" to a status; `at_request` is called with every "METHOD path" first.
    """

    def __init__(self):
        self.repos: dict[str, dict] = {}
        self.objects: dict[str, bytes] = {}
        self.requests: list[str] = []
        self.uploads: Counter = Counter()
        self.drop_uploads = self.drop_commits = 0
        self.fail: dict[str, int] = {}
        self.at_request: Callable[[str], None] | None = None
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

        def _answer(self, status, content=None, **headers):
            body = content if isinstance(content, bytes) else json.dumps(content or {}).encode()
            self.send_response(status)
            length = {"Content-Type": "application/json", "Content-Length": str(len(body))}
            for name, value in (length | headers).items():
                self.send_header(name.replace("_", "-"), value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

        def _error(self, status, text, **headers):
            self._answer(status, {"error": text}, **headers)

        def _drop(self):
            self.close_connection = True
            self.connection.close()

        def _handle(self):
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            path = self.path.split("?")[0]
            if path.startswith(("/api/telemetry", "/api/agent-harnesses")):  # of the client, not of publishing
                return self._answer(200)
            request = f"{self.command} {path}"
            hub.requests.append(request)
            if hub.at_request is not None:
                hub.at_request(request)
            for pattern, status in hub.fail.items():
                if re.fullmatch(pattern, request):
                    return self._error(status, f"refused for {self.headers.get('Authorization')}")
            if path.startswith("/lfs/"):
                return self._upload(path, body)
            if self.headers.get("Authorization") != f"Bearer {TOKEN}":
                return self._error(401, "Invalid username or password.")
            for pattern, route in ROUTES:
                if match := re.fullmatch(pattern, request):
                    return route(self, body, *match.groups())
            return self._error(404, f"the stand-in has no {request}")

        do_GET = do_POST = do_PUT = do_HEAD = _handle

        def _repo(self, name, revision="main"):
            repo = hub.repos.get(name)
            if repo is None:
                self._error(404, "Repository not found", X_Error_Code="RepoNotFound")
            elif revision not in ("main", *repo.get("branches", ())) and not re.fullmatch("[0-9a-f]{40}", revision):
                repo = self._error(404, f"Invalid rev id: {revision}", X_Error_Code="RevisionNotFound")
            return repo

        def branch(self, body, name, branch):
            if (repo := self._repo(name)) is None:
                return
            if branch in repo.setdefault("branches", []):
                return self._error(409, "Reference already exists")
            repo["branches"].append(branch)
            self._answer(200)

        def create(self, body):
            asked = json.loads(body)
            name = f"{asked.get('organization') or 'tester'}/{asked['name']}"
            known = {"url": f"{hub.endpoint}/{name}", "name": name}
            if name.startswith("stranger/"):
                return self._error(403, "You don't have the rights to create a model here")
            if name in hub.repos:
                return self._answer(409, {"error": "You already created this model repo", **known})
            hub.put(name, bool(asked.get("private") or asked.get("visibility") == "private"))
            return self._answer(200, known)

        def info(self, body, name, revision="main"):
            if (repo := self._repo(name, revision)) is None:
                return
            found = {"id": name, "modelId": name, "private": repo["private"], "sha": f"{len(repo['commits']):040x}"}
            self._answer(200, {**found, "siblings": [{"rfilename": file} for file in repo["files"]]})

        def tree(self, body, name, revision):
            if (repo := self._repo(name, revision)) is None:
                return
            files = repo["files"].items()
            self._answer(200, [{"type": "file", "path": path, "size": len(data), "oid": "0"} for path, data in files])

        def validate(self, body):
            self._answer(200, {"errors": [], "warnings": []})

        def preupload(self, body, name, revision):
            if (repo := self._repo(name, revision)) is None:
                return
            files = []
            for file in json.loads(body)["files"]:
                lfs = file["path"].endswith((".safetensors", ".png"))
                answer = {"path": file["path"], "uploadMode": "lfs" if lfs else "regular", "shouldIgnore": False}
                if (data := repo["files"].get(file["path"])) is not None:
                    git = hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
                    answer["oid"] = hashlib.sha256(data).hexdigest() if lfs else git
                files.append(answer)
            self._answer(200, {"files": files})

        def batch(self, body, name):
            objects = []
            for item in json.loads(body)["objects"]:
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
                return self._error(400, "wrong content")
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
            if (data := repo["files"].get(file)) is None:
                return self._error(404, "Entry not found", X_Error_Code="EntryNotFound")
            commit = f"{len(repo['commits']):040x}"
            return self._answer(200, data, ETag=f'"{hashlib.sha1(data).hexdigest()}"', X_Repo_Commit=commit)

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
