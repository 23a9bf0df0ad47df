"""rename_symbols.py TREE TABLE.tsv [KINDS] [PREFIX]: typed renames of methods, functions, classes and fields through basedpyright's language server."""

import ast
import json
import os
import pathlib
import queue
import subprocess
import sys
import threading
import time
import urllib.parse

tree = pathlib.Path(sys.argv[1]).resolve()
kinds = (sys.argv[3] if len(sys.argv) > 3 else "field,method,function,constant,class").split(",")
PKG = tree / "src/closeranks"
MOVED = json.loads(os.environ.get("MOVED", "{}"))
rows = [l.rstrip("\n").split("\t") for l in open(sys.argv[2]) if l.strip() and not l.startswith("#")]
prefix = sys.argv[4] if len(sys.argv) > 4 else ""
rows = [r for k in kinds for r in rows if r[0] == k and r[1].startswith(prefix)]

(tree / "pyrightconfig.json").write_text(
    json.dumps(
        {
            "include": ["src", "tests", "benchmarks", "examples"],
            "exclude": ["**/__pycache__", "tests/golden/written_before"],
            "extraPaths": ["src", "benchmarks"],
            "venvPath": ".",
            "venv": ".venv",
            "typeCheckingMode": "off",
        }
    )
)


class Server:
    def __init__(self):
        exe = os.environ.get("LANGSERVER", "basedpyright-langserver")
        self.p = subprocess.Popen([exe, "--stdio"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=tree)
        self.n, self.answers = 0, queue.Queue()
        threading.Thread(target=self.read, daemon=True).start()

    def send(self, m):
        b = json.dumps({"jsonrpc": "2.0", **m}).encode()
        self.p.stdin.write(b"Content-Length: %d\r\n\r\n" % len(b) + b)
        self.p.stdin.flush()

    def read(self):
        f = self.p.stdout
        while True:
            size = 0
            while True:
                h = f.readline()
                if not h:
                    return
                if h == b"\r\n":
                    break
                if h.lower().startswith(b"content-length"):
                    size = int(h.split(b":")[1])
            m = json.loads(f.read(size))
            if "id" in m and "method" in m:
                r = None
                if m["method"] == "workspace/configuration":
                    r = [{} for _ in m["params"]["items"]]
                self.send({"id": m["id"], "result": r})
            elif "id" in m:
                self.answers.put(m)

    def ask(self, method, params, wait=300):
        self.n += 1
        self.send({"id": self.n, "method": method, "params": params})
        end = time.time() + wait
        while True:
            m = self.answers.get(timeout=max(1, end - time.time()))
            if m["id"] == self.n:
                return m

    def tell(self, method, params):
        self.send({"method": method, "params": params})


uri = lambda p: p.as_uri()
path = lambda u: pathlib.Path(urllib.parse.unquote(urllib.parse.urlparse(u).path))


def locate(kind, place):
    file, name = place.split(":")
    f = PKG / MOVED.get(file, file)
    text = f.read_text()
    t = ast.parse(text)
    lines = text.split("\n")

    def col(n, key, nm):
        i = n.lineno - 1
        if kind in ("function", "method", "class"):
            while not lines[i].lstrip().startswith(("def ", "async def ", "class ")):
                i += 1
        return i, lines[i].index(nm, lines[i].index(key) + len(key))

    D = (ast.FunctionDef, ast.AsyncFunctionDef)
    if kind == "class":
        for n in ast.walk(t):
            if isinstance(n, ast.ClassDef) and n.name == name:
                return f, *col(n, "class ", name)
        for n in t.body:  # a type alias
            if isinstance(n, (ast.Assign, ast.AnnAssign)):
                tg = n.targets[0] if isinstance(n, ast.Assign) else n.target
                if isinstance(tg, ast.Name) and tg.id == name:
                    return f, tg.lineno - 1, tg.col_offset
            if hasattr(ast, "TypeAlias") and isinstance(n, ast.TypeAlias) and n.name.id == name:
                return f, n.name.lineno - 1, n.name.col_offset
    if kind in ("function", "constant"):
        for n in t.body:
            if isinstance(n, D) and n.name == name:
                return f, *col(n, "def ", name)
            if isinstance(n, (ast.Assign, ast.AnnAssign)):
                tg = n.targets[0] if isinstance(n, ast.Assign) else n.target
                if isinstance(tg, ast.Name) and tg.id == name:
                    return f, tg.lineno - 1, tg.col_offset
        for n in ast.walk(t):
            if isinstance(n, D) and n.name == name:
                return f, *col(n, "def ", name)
    if kind in ("method", "field"):
        c, m = name.split(".")
        for n in ast.walk(t):
            if isinstance(n, ast.ClassDef) and n.name == c:
                for x in n.body:
                    if isinstance(x, D) and x.name == m:
                        return f, *col(x, "def ", m)
                    if isinstance(x, ast.AnnAssign) and isinstance(x.target, ast.Name) and x.target.id == m:
                        return f, x.target.lineno - 1, x.target.col_offset
                    if isinstance(x, ast.Assign) and isinstance(x.targets[0], ast.Name) and x.targets[0].id == m:
                        return f, x.targets[0].lineno - 1, x.targets[0].col_offset
                for x in ast.walk(n):
                    if isinstance(x, (ast.Assign, ast.AnnAssign)):
                        for tg in x.targets if isinstance(x, ast.Assign) else [x.target]:
                            if isinstance(tg, ast.Attribute) and tg.attr == m:
                                return f, tg.end_lineno - 1, tg.end_col_offset - len(m)
    return None


s = Server()
s.ask(
    "initialize",
    {
        "processId": os.getpid(),
        "rootUri": uri(tree),
        "workspaceFolders": [{"uri": uri(tree), "name": "t"}],
        "capabilities": {
            "workspace": {
                "configuration": True,
                "workspaceEdit": {"documentChanges": False},
                "didChangeWatchedFiles": {"dynamicRegistration": True},
            },
            "textDocument": {"rename": {}},
        },
    },
)
s.tell("initialized", {})
time.sleep(20)
done = bad = 0
renamed = {}
t0 = time.time()
for r in rows:
    kind, place, new = r[0], r[1], r[2]
    file, name = place.split(":")
    at = locate(kind, place)
    if at is None:
        print("NOT FOUND", *r[:3])
        bad += 1
        continue
    f, line, col = at
    s.tell(
        "textDocument/didOpen",
        {"textDocument": {"uri": uri(f), "languageId": "python", "version": 1, "text": f.read_text()}},
    )
    a = s.ask(
        "textDocument/rename",
        {"textDocument": {"uri": uri(f)}, "position": {"line": line, "character": col}, "newName": new},
    )
    s.tell("textDocument/didClose", {"textDocument": {"uri": uri(f)}})
    res = a.get("result")
    if not res:
        print("REFUSED", *r[:3], a.get("error"))
        bad += 1
        continue
    changes = res.get("changes") or {d["textDocument"]["uri"]: d["edits"] for d in res["documentChanges"]}
    n = 0
    for u, edits in changes.items():
        p = path(u)
        if ".venv" in p.parts or not str(p).startswith(str(tree)):
            print("OUTSIDE", p)
            continue
        ls = p.read_text().split("\n")
        for e in sorted(
            edits, key=lambda e: (e["range"]["start"]["line"], e["range"]["start"]["character"]), reverse=True
        ):
            i, j, k = e["range"]["start"]["line"], e["range"]["start"]["character"], e["range"]["end"]["character"]
            ls[i] = ls[i][:j] + e["newText"] + ls[i][k:]
            n += 1
        p.write_text("\n".join(ls))
    s.tell("workspace/didChangeWatchedFiles", {"changes": [{"uri": u, "type": 2} for u in changes]})
    done += 1
    print(f"{kind} {place} -> {new}: {n} edits in {len(changes)} files", flush=True)
print(f"{done} renamed, {bad} not, {time.time() - t0:.0f} s")
s.p.kill()
(tree / "pyrightconfig.json").unlink()
