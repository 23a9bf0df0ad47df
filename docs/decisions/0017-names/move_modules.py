"""move_modules.py TREE TABLE.tsv [PREFIX]: git mv of modules and their tests; imports and path mentions rewritten."""

import pathlib
import re
import subprocess
import sys

tree = pathlib.Path(sys.argv[1]).resolve()
prefix = sys.argv[3] if len(sys.argv) > 3 else ""
rows = [l.rstrip("\n").split("\t") for l in open(sys.argv[2]) if l.strip() and not l.startswith("#")]
moves = {r[1]: r[2] for r in rows if r[0] == "module" and r[1].startswith(prefix) and r[1] != r[2]}
git = lambda *a: subprocess.run(["git", *a], cwd=tree, check=True)
pkg = tree / "src/closeranks"


# through temporary names first: a new path may be another's old one
def ensure(folder):
    while folder != pkg and folder != tree / "tests":
        folder.mkdir(parents=True, exist_ok=True)
        init = folder / "__init__.py"
        if not init.exists():
            init.write_text("")
            git("add", str(init))
        folder = folder.parent


tests = {}
for o, n in moves.items():
    po, pn = pathlib.Path(o), pathlib.Path(n)
    to = tree / "tests" / po.parent / f"test_{po.name}"
    if to.exists():
        tests[to.relative_to(tree).as_posix()] = (pathlib.Path("tests") / pn.parent / f"test_{pn.name}").as_posix()
for base, table in ((pkg, moves), (tree, tests)):
    for o in table:
        git("mv", str(base / o), str(base / (o + ".moving")))
    for o, n in table.items():
        ensure((base / n).parent)
        git("mv", str(base / (o + ".moving")), str(base / n))
dotted = lambda p: "closeranks." + p.removesuffix(".py").replace("/", ".")
mods = {dotted(o): dotted(n) for o, n in moves.items()}
tmods = {o.removesuffix(".py").replace("/", "."): n.removesuffix(".py").replace("/", ".") for o, n in tests.items()}
allm = {**mods, **tmods}
names = sorted(allm, key=len, reverse=True)
rx = re.compile(r"(?<![\w.])(" + "|".join(map(re.escape, names)) + r")(?![\w])") if names else None
bypkg = {}
for o, n in allm.items():
    a, b = o.rsplit(".", 1)
    bypkg.setdefault(a, {})[b] = n
paths = {}
for o, n in moves.items():
    paths["src/closeranks/" + o] = "src/closeranks/" + n
    paths[o] = n
paths.update(tests)
prx = re.compile(
    r"(?<![\w./-])((?:\.\./)*)(" + "|".join(map(re.escape, sorted(paths, key=len, reverse=True))) + r")(?![\w])"
)


def froms(m):
    indent, p, what = m.group(1), m.group(2), m.group(3)
    if p not in bypkg:
        return m.group(0)
    body = what.strip()
    par = body.startswith("(")
    comments = re.findall(r"#.*", body)
    items = [x.strip() for x in re.sub(r"#.*", "", body).strip("()\n ").replace("\n", " ").split(",") if x.strip()]
    out, rest = [], []
    for x in items:
        nm, _, alias = x.partition(" as ")
        if nm in bypkg[p]:
            np, nn = bypkg[p][nm].rsplit(".", 1)
            # a renamed module keeps the name used in the file's body
            out.append(
                f"{indent}from {np} import {nn}" + (f" as {alias}" if alias else (f" as {nm}" if nn != nm else ""))
            )
        else:
            rest.append(x)
    if not out:
        return m.group(0)
    if rest:
        out.insert(0, f"{indent}from {p} import " + ", ".join(rest))
    return "\n".join(out) + ("  " + comments[0] if comments else "")


frx = re.compile(r"^([ \t]*)from ([\w.]+) import (\([^)]*\)|[^\n(]+)", re.M)
files = subprocess.run(["git", "ls-files"], cwd=tree, capture_output=True, text=True, check=True).stdout.split()
for f in files:
    p = tree / f
    if (
        f.startswith("tests/golden/written_before")
        or p.suffix in (".png", ".gz", ".zst", ".bin", ".safetensors")
        or not p.is_file()
    ):
        continue
    try:
        t = p.read_text()
    except UnicodeDecodeError:
        continue
    s = t
    if p.suffix in (".py", ".md", ".patch"):
        s = frx.sub(froms, s)
    if rx:
        s = rx.sub(lambda m: allm[m.group(1)], s)
    s = prx.sub(lambda m: m.group(1) + paths[m.group(2)], s)
    if s != t:
        p.write_text(s)
for d in sorted(pkg.rglob("*"), reverse=True):
    if (
        d.is_dir()
        and d.name != "__pycache__"
        and [x.name for x in d.iterdir() if x.name != "__pycache__"] == ["__init__.py"]
        and not (d / "__init__.py").read_text().strip()
    ):
        print("empty package left:", d)
print(len(moves), "modules,", len(tests), "tests moved")
