"""rename_in_text.py TREE TABLE: old names in code spans of docs, docstrings and comments; prints what it leaves."""

import ast
import collections
import pathlib
import re
import subprocess
import sys

tree = pathlib.Path(sys.argv[1])
rows = [l.rstrip("\n").split("\t") for l in open(sys.argv[2]) if l.strip() and not l.startswith("#")]
new = collections.defaultdict(set)
for k, o, n, *_ in rows:
    if k in ("class", "function", "method", "field", "constant"):
        new[o.split(":")[1].split(".")[-1]].add((k, n))
# names that still exist under the old word somewhere
left = set()
for p in (tree / "src").rglob("*.py"):
    for x in ast.walk(ast.parse(p.read_text())):
        if isinstance(x, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            left.add(x.name)
        if isinstance(x, ast.AnnAssign) and isinstance(x.target, ast.Name):
            left.add(x.target.id)
sure = {
    o: next(iter(v))[1]
    for o, v in new.items()
    if len({n for _, n in v}) == 1 and o not in left and (o[0].isupper() or "_" in o)
}
dotted = {}
for k, o, n, *_ in rows:
    if k in ("method", "field"):
        c, m = o.split(":")[1].split(".")
        dotted.setdefault((c, m), set()).add(n)
cls = collections.defaultdict(set)
for k, o, n, *_ in rows:
    if k == "class":
        cls[o.split(":")[1]].add(n)


def span(m):
    s = m.group(0)

    def dot(d):
        c, a = d.group(1), d.group(2)
        na = dotted.get((c, a))
        nc = cls.get(c)
        return (
            (next(iter(nc)) if nc and len(nc) == 1 and c not in left else c)
            + "."
            + (next(iter(na)) if na and len(na) == 1 else a)
        )

    s = re.sub(r"\b([A-Z]\w+)\.([a-z_]\w*)\b", dot, s)
    return re.sub(r"(?<![\w/\"'.-])([A-Za-z_]\w+)(?![\w/-])", lambda w: sure.get(w.group(1), w.group(1)), s)


files = subprocess.run(
    ["git", "ls-files", "docs", "README.md", "CONTRIBUTING.md", "src", "tests", "benchmarks", "examples"],
    cwd=tree,
    capture_output=True,
    text=True,
).stdout.split()
n = 0
for f in files:
    p = tree / f
    if "written_before" in f or p.suffix not in (".py", ".md", ".patch") or f.startswith("docs/decisions/0017"):
        continue
    t = p.read_text()
    if p.suffix == ".md":
        parts = re.split(r"(^```.*?^```[ \t]*$)", t, flags=re.S | re.M)
        for i, x in enumerate(parts):
            if i % 2 == 0:
                parts[i] = re.sub(r"(?<!`)`[^`\n]+`(?!`)", span, x)
            elif re.match(r"```(python|diff)", x):
                parts[i] = span(re.match(r"(?s).*", x))
        s = "".join(parts)
    elif p.suffix == ".patch":
        s = span(re.match(r"(?s).*", t))
    else:
        s = re.sub(r"``[^`\n]+``", span, t)
    if s != t:
        p.write_text(s)
        n += 1
print(n, "files;", len(sure), "sure names;", "not sure:", sorted(o for o in new if o not in sure and o[0].isupper()))
