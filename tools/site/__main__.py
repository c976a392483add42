"""Builds the site into build/site; a link that leads nowhere fails the build.

`python -m tools.site`; `make docs` calls it after the generators of pages.
"""

from __future__ import annotations

import shutil
import subprocess
import sys

from tools.site.mermaid import bring
from tools.site.pages import MERMAID, ROOT, SETTINGS, gather, settings


def main() -> None:
    """Gather the pages and make the site of them; exit with 1 if the generator refuses one."""
    values = settings()
    pages, site = ROOT / values["docs_dir"], ROOT / values["site_dir"]
    kept = ROOT / "build" / "mermaid.min.js"
    bring(kept)
    for folder in (pages, site):
        # A page that was removed must not stay, for a link to it would still be found.
        shutil.rmtree(folder, ignore_errors=True)
    gather(pages)
    shutil.copyfile(kept, pages / MERMAID)
    command = [sys.executable, "-m", "zensical", "build", "--strict", "--clean"]
    done = subprocess.run([*command, "--config-file", str(SETTINGS)], cwd=ROOT, check=False)
    if done.returncode:
        raise SystemExit(f"the site was not built: {command[2]} exits with {done.returncode}")
    sys.stdout.write(f"the site is in {site.relative_to(ROOT)}: open {site / 'index.html'}\n")


if __name__ == "__main__":
    main()
