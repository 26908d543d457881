"""Drives the page at / in a headless Chromium.

page.py URL CHROMIUM [--key KEY] [--shots FOLDER] [--all] CASE...

Each case is PROTECTION:EXPECTED, where EXPECTED is held or diverged. Prints a line a case and ends with 1 at the first
surprise. With --all, all the rest of the page is tried, too. With --shots, writes screenshots: light, dark and 390 pixels
wide.
"""

import argparse
import json
import re
import struct
import sys

from playwright.sync_api import expect, sync_playwright

parser = argparse.ArgumentParser()
parser.add_argument("url")
parser.add_argument("chromium")
parser.add_argument("--key")
parser.add_argument("--shots")
parser.add_argument("--all", action="store_true")
parser.add_argument("cases", nargs="*")
args = parser.parse_intermixed_args()


def bits(cell):
    return struct.unpack(">f", bytes.fromhex(cell[2:]))[0]


def rows(page):
    """The table, row by row: its cells' texts."""
    return [row.locator("td").all_inner_texts() for row in page.locator("#rows tr").all()]


def unlock(page):
    page.goto(args.url)
    if args.key:
        expect(page.locator("#verdict")).to_have_text("An API key is needed")
        expect(page.locator("#run")).to_be_disabled()
        page.fill("#key", "wrong")
        page.press("#key", "Tab")
        expect(page.locator("#verdict")).to_have_text("This API key is not known here")
        page.fill("#key", args.key)
        page.press("#key", "Tab")
    expect(page.locator("#run")).to_be_enabled()


def run(page, protection, tokens=24, kind="mixed"):
    page.select_option("#protection", protection)
    page.select_option("#kind", kind)
    page.fill("#tokens", str(tokens))
    page.click("#run")
    expect(page.locator("#run")).to_be_enabled(timeout=120_000)
    return page.locator("#verdict").inner_text()


def case(page, protection, expected):
    verdict = run(page, protection)
    pattern = {"held": r"HELD: 24 steps, same bits", "diverged": r"DIVERGED at step (\d+)"}[expected]
    found = re.match(pattern, verdict)
    assert found, f"{protection}: {verdict}, not {expected}"
    assert int(re.search(r"neighbours made (\d+) tokens", page.locator("#promise").inner_text())[1]) > 0
    marked = page.locator("#crowd .bits").count(), page.locator("#solo .bits").count()
    table = rows(page)
    assert len(table) == 20, table
    step = int(page.input_value("#step"))
    for cells in table:
        logit = bits(cells[2])
        assert abs(logit - float(cells[3])) <= 1e-5 * max(1, abs(logit)), cells
    differing = [cells for cells in table if cells[9] == "≠"]
    if expected == "held":
        assert marked == (0, 0) and step == 24 and not differing, (marked, step)
        assert all(cells[1:5] == cells[5:9] and cells[9] == "=" for cells in table), table
        assert page.locator("#solo").inner_text() == page.locator("#crowd").inner_text()
    else:
        assert marked == (1, 1) and step == int(found[1]) and differing, (marked, step)
        assert all(cells[1:3] != cells[5:7] for cells in differing), differing
        both = [page.locator(f"#{side} [role=option]").all_inner_texts() for side in ("solo", "crowd")]
        first = next((i for i, (a, b) in enumerate(zip(*both)) if a != b), None)
        token = page.locator("#crowd .token")
        assert token.count() == (0 if first is None else 1), first
        if first is not None:
            assert token.get_attribute("id") == f"crowd-{first}" and first + 1 >= step, (first, step)
    print(f"{protection}: {verdict}")


def keyboard(page):
    """Everything by keys alone: run, then walk the steps."""
    page.focus("#prompt")
    for _ in range(20):
        if page.evaluate("document.activeElement.id") == "run":
            break
        page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    expect(page.locator("#verdict")).to_contain_text(re.compile("HELD|DIVERGED"), timeout=120_000)
    page.focus("#solo")
    page.keyboard.press("Home")
    assert page.input_value("#step") == "1"
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    assert page.input_value("#step") == "3"
    assert page.get_attribute("#solo", "aria-activedescendant") == "solo-2"
    assert page.get_attribute("#crowd-2", "aria-selected") == "true"
    page.fill("#step", "2")
    assert "Step 2" in page.locator("#caption").inner_text()
    print("keyboard: steps chosen")


def token(page):
    """A crowd's stream whose fifth token was forged: it is marked on both sides, and its step is shown."""
    targets = []

    def forge(route):
        if not json.loads(route.request.post_data).get("logprobs"):
            return route.continue_()
        targets.append(route)
        if len(targets) == 1:
            return route.continue_()
        lines, steps = route.fetch().text().split("\n"), 0
        for i, line in enumerate(lines):
            chunk = json.loads(line[6:]) if line.startswith("data: {") else {"choices": []}
            for choice in chunk["choices"]:
                if not choice["logprobs"]:
                    continue
                steps += 1
                if steps == 5:
                    choice["logprobs"]["token_ids"][0] += 1
                    lines[i] = "data: " + json.dumps(chunk)
        return route.fulfill(body="\n".join(lines), content_type="text/event-stream")

    page.route("**/v1/completions", forge)
    verdict = run(page, "invariant")
    page.unroute("**/v1/completions")
    assert verdict == "DIVERGED at step 5, token and bits", verdict
    for side in ("solo", "crowd"):
        assert page.locator(f"#{side} .token").count() == 1
        assert page.get_attribute(f"#{side} .token", "id") == f"{side}-4"
    assert page.input_value("#step") == "5"
    print("token: marked")


def errors(page):
    """What the server refuses, and how, is shown; so is a stream that breaks off, and a run that is stopped."""
    refusal = json.dumps({"error": {"message": "the queue is full", "type": "rate_limit_error", "param": None, "code": "x"}})
    for answer, text in [
        ({"status": 429, "body": refusal}, "ERROR: the queue is full"),
        ({"status": 502, "body": "bad gateway"}, "ERROR: bad gateway"),
        ({"status": 200, "body": "data: " + refusal + "\n\n"}, "ERROR: the queue is full"),
        ({"status": 200, "body": ": nothing\n\n"}, "ERROR: the stream broke off"),
    ]:
        page.route("**/v1/completions", lambda route, _, answer=answer: route.fulfill(**answer))
        page.click("#run")
        expect(page.locator("#verdict")).to_have_text(text)
        expect(page.locator("#state")).to_have_class(re.compile("error"))
        expect(page.locator("#run")).to_be_enabled()
        page.unroute("**/v1/completions")
    right = page.input_value("#prompt")
    for wrong in ("x", "4000000000"):
        page.fill("#prompt", wrong)
        page.click("#run")
        expect(page.locator("#verdict")).to_contain_text("ERROR: ")
    page.fill("#prompt", right)
    page.fill("#tokens", "1000")
    page.click("#run")
    page.click("#stop")
    expect(page.locator("#verdict")).to_have_text("Stopped")
    expect(page.locator("#run")).to_be_enabled()
    print("errors: shown")


def narrow(page):
    """Nothing is wider than a narrow screen."""
    wide = page.evaluate("document.documentElement.scrollWidth")
    assert wide <= 390, f"the page is {wide} pixels wide on a screen of 390"
    print("narrow: fits")


with sync_playwright() as playwright:
    browser = playwright.chromium.launch(executable_path=args.chromium, args=["--no-sandbox"])
    page = browser.new_page(viewport={"width": 1200, "height": 900})
    wrong = []
    page.on("console", lambda m: wrong.append(m.text) if m.type == "error" and "Content Security" in m.text else None)
    page.on("pageerror", lambda e: wrong.append(str(e)))
    page.on("request", lambda r: None if r.url.startswith(args.url) else wrong.append(f"asks {r.url}"))
    unlock(page)
    page.fill("#neighbours", "12")
    for one in args.cases:
        case(page, *one.split(":"))
        if args.shots:
            name = one.replace(":", "-")
            page.emulate_media(color_scheme="light")
            page.screenshot(path=f"{args.shots}/{name}-light.png", full_page=True)
            page.emulate_media(color_scheme="dark")
            page.screenshot(path=f"{args.shots}/{name}-dark.png", full_page=True)
            page.set_viewport_size({"width": 390, "height": 844})
            page.screenshot(path=f"{args.shots}/{name}-narrow.png", full_page=True)
            page.set_viewport_size({"width": 1200, "height": 900})
    if args.all:
        for kind in ("long", "late", "leaving"):
            verdict = run(page, "invariant", kind=kind)
            assert verdict.startswith("HELD"), f"{kind}: {verdict}"
            print(f"{kind}: {verdict}")
        page.fill("#neighbours", "0")
        verdict, note = run(page, "invariant"), page.locator("#promise").inner_text()
        assert verdict.startswith("HELD") and note.startswith("0 neighbours made 0 tokens"), (verdict, note)
        page.fill("#neighbours", "12")
        keyboard(page)
        token(page)
        errors(page)
    page.set_viewport_size({"width": 390, "height": 844})
    if args.all:
        run(page, "invariant")
    narrow(page)
    browser.close()
    if wrong:
        sys.exit(f"the page did what it may not: {wrong}")
