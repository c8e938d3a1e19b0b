"""Print the lines of Python in each folder, and the files past the house's limit."""

import sys
from pathlib import Path

LIMIT = 500

if __name__ == "__main__":
    total, long = 0, []
    for folder in sys.argv[1:]:
        files = sorted(Path(folder).rglob("*.py"))
        lines = {file: len(file.read_text(encoding="utf-8").splitlines()) for file in files}
        long += [(file, count) for file, count in lines.items() if count > LIMIT]
        total += sum(lines.values())
        print(f"{folder:12} {len(files):4} files {sum(lines.values()):7} lines")
    print(f"{'total':12} {'':10} {total:7} lines")
    for file, count in long:
        print(f"over {LIMIT} lines: {file} ({count})")
