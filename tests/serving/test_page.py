"""Tests of the page of ``mmnmt serve`` in Chromium, used with keys and a mouse."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.browser import CHROMIUM, CTRL, SHIFT, Tab, browser
from support.served import Served, make_model, serving

WIDTH = 360
TEXT = "Ein Haus. " * 20
LINES = "Ein altes Haus.\n\nDer Baum steht neben dem Haus!\nJa, und der Tag?\nNein.\nEin Weg am See"
GERMAN = "Das ist ein Satz, der auf Deutsch geschrieben wurde, und niemand zweifelt daran."
RED = "rgb(163, 57, 77)"
SYSTEMS = ("narrow", "wide")
LIMIT = 2000
NO_TIMERS = "window.setTimeout = () => 0;"
NO_CLIPBOARD = "Object.defineProperty(navigator, 'clipboard', { value: undefined });"
"""As in a page that another machine gives without TLS."""

pytestmark = [pytest.mark.slow, pytest.mark.skipif(CHROMIUM is None, reason="needs chromium")]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Two systems; the second of them knows Turkish, too."""
    codes = ("ar", "de", "en", "fr")
    narrow = make_model(tmp_path_factory.mktemp("narrow") / "narrow", codes=codes)
    return [narrow, make_model(tmp_path_factory.mktemp("wide") / "wide", codes=(*codes, "tr"))]


@pytest.fixture(scope="module")
def served(models: list[str]) -> Iterator[Served]:
    with serving(*models, "--max-characters", str(LIMIT)) as (running, _):
        yield running


@pytest.fixture(scope="module")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tab]:
    with browser(tmp_path_factory.mktemp("profile")) as tab:
        yield tab


@pytest.fixture
def tab(chromium: Tab) -> Iterator[Tab]:
    """A new tab, whose page may ask its own server alone and whose script may not fail."""
    chromium.open()
    yield chromium
    origin = chromium.run("location.origin")
    assert chromium.requests
    assert all(asked["url"].startswith((origin, "data:")) for asked in chromium.requests)
    assert not chromium.problems


def visit(
    tab: Tab,
    served: Served,
    *,
    width: int = 1280,
    theme: str = "light",
    script: str = "",
    forgets: bool = True,
) -> None:
    """Open the page on a screen of a width; a script runs before those of the page."""
    if forgets:
        storage = {"origin": served.address, "storageTypes": "local_storage"}
        tab.tell("Storage.clearDataForOrigin", **storage)
    tab.tell("Page.addScriptToEvaluateOnNewDocument", source=script)
    screen = {"width": width, "height": 800, "deviceScaleFactor": 1, "mobile": width == WIDTH}
    tab.tell("Emulation.setDeviceMetricsOverride", **screen)
    scheme = {"name": "prefers-color-scheme", "value": theme}
    tab.tell("Emulation.setEmulatedMedia", features=[scheme])
    tab.tell("Page.navigate", url=served.address)
    tab.wait_for("document.querySelector('article') && document.activeElement.id === 'text'")


def by_id(name: str) -> str:
    return f"document.getElementById('{name}')"


def within(system: str, selector: str) -> str:
    """An element of the card of a system."""
    return (
        f"document.querySelectorAll('article')[{SYSTEMS.index(system)}].querySelector('{selector}')"
    )


def choose(tab: Tab, field: str, typed: str) -> None:
    """Choose the language that is found by what is typed, with the mouse."""
    tab.click(by_id(field))
    tab.type(typed)
    tab.click(f"document.querySelector('#{field}-list li')")


def fill(tab: Tab, text: str) -> None:
    """Paste text into the text field, in place of what stands there."""
    tab.run(f"{by_id('text')}.select()")
    tab.tell("Input.insertText", text=text)


def wait_for_text(tab: Tab, system: str, text: str) -> None:
    tab.wait_for(f"{within(system, 'p')}.textContent === {json.dumps(text)}")


def wait_for_note(tab: Tab, text: str) -> None:
    tab.wait_for(f"{by_id('note')}.textContent === {json.dumps(text)}")


def bodies(tab: Tab) -> list[dict[str, Any]]:
    """What the page has asked to be translated, in order."""
    return [json.loads(asked["postData"]) for asked in tab.requests if asked["method"] == "POST"]


def alignments(answer: dict[str, Any]) -> list[tuple[str, list[str]]]:
    """The aligned words of an answer, each with its source words in the order of the source."""
    found = []
    for line in filter(None, answer["details"]):
        for index, word in enumerate(line["words"]):
            sources = sorted({source for source, target in line["alignment"] if target == index})
            # A form feed or another line break within a word is a space in the text.
            if sources and word["text"] in answer["translatedText"]:
                found.append((word["text"], [line["source_words"][one] for one in sources]))
    return found


def marked(tab: Tab) -> Any:
    """The marked words of the source, which the eye finds in the text field."""
    return tab.run("[...document.querySelectorAll('mark')].map(mark => mark.textContent)")


def test_text_typed_into_the_page_is_translated_on_a_dark_phone(tab: Tab, served: Served) -> None:
    visit(tab, served, width=WIDTH, theme="dark")
    choose(tab, "from", "deu")
    choose(tab, "to", "ara")
    fill(tab, TEXT)
    expected = served.post(q=TEXT, target="ar").json()["translatedText"]
    wait_for_text(tab, "narrow", expected)
    shown, colors = within("narrow", "p"), "getComputedStyle(document.body)"
    found = tab.run(f"[{shown}.dir, {shown}.lang, innerWidth, {colors}.backgroundColor]")
    assert found == ["rtl", "ar", WIDTH, "rgb(21, 24, 28)"]
    fill(tab, "W" * 400)
    assert tab.run("document.documentElement.scrollWidth") == WIDTH
    assert tab.run("(({ scrollHeight, clientHeight }) => scrollHeight - clientHeight)(text)") == 0
    stacked = "[...document.querySelectorAll('article')].map(card => card.offsetLeft)"
    assert len(set(tab.run(stacked))) == 1


def test_systems_translate_side_by_side_with_their_other_hypotheses(
    tab: Tab, served: Served
) -> None:
    visit(tab, served)
    choose(tab, "from", "deu")
    choose(tab, "to", "engl")
    tab.click(by_id("text"))
    tab.type("Ein Haus.")
    items = "[...document.querySelectorAll('article')].map(card => [...card.querySelectorAll('li')]"
    answers = [served.post(q="Ein Haus.", system=name, alternatives=2).json() for name in SYSTEMS]
    for name, answer in zip(SYSTEMS, answers, strict=True):
        wait_for_text(tab, name, answer["translatedText"])
    found = tab.run(f"{items}.map(item => item.textContent))")
    assert found == [answer["alternatives"] for answer in answers]
    assert all(found)
    boxes = (
        "[...document.querySelectorAll('article')].map(card => [card.offsetTop, card.offsetLeft])"
    )
    (top, left), (other_top, other_left) = tab.run(boxes)
    assert top == other_top
    assert left < other_left
    tab.click("document.querySelectorAll('#systems input')[1]")
    asked = len(bodies(tab))
    fill(tab, "Haus")
    wait_for_text(tab, "narrow", served.post(q="Haus", system="narrow").json()["translatedText"])
    assert {body["system"] for body in bodies(tab)[asked:]} == {"narrow"}
    assert tab.run(f"{within('wide', 'p')}.offsetParent") is None
    tab.click("document.querySelectorAll('#systems input')[1]")
    wait_for_text(tab, "wide", served.post(q="Haus", system="wide").json()["translatedText"])


def test_a_language_is_found_by_a_part_of_one_of_its_names(tab: Tab, served: Served) -> None:
    listed = "[...document.querySelectorAll('#to-list bdi')].map(name => name.textContent)"
    own_names = {one["code"]: one["nativeName"] for one in served.ask("/languages").json()}
    assert own_names["tr"] == "Türkçe"
    visit(tab, served)
    tab.click(by_id("to"))
    assert tab.run(listed) == list(own_names.values())
    for typed, code in {"ürk": "tr", "turkce": "tr", "erm": "de", "عرب": "ar", "fr": "fr"}.items():
        tab.tell("Input.insertText", text=typed)
        assert tab.run(listed) == [own_names[code]]
        tab.click("document.querySelector('#to-list li')")
        assert tab.run(f"{by_id('to')}.value") == f"{own_names[code]} ({code})"
        assert tab.run(f"{by_id('to-list')}.hidden")
    tab.type("xyz")
    wait_for_note(tab, 'No language has "xyz" in its name.')
    assert tab.run(f"{by_id('to')}.ariaInvalid") == "true"
    tab.press("Escape")
    shown = f"[{by_id('to')}.value, {by_id('to')}.ariaInvalid, {by_id('note')}.textContent]"
    assert tab.run(shown) == ["français (fr)", "false", ""]
    tab.type("en")
    tab.click(by_id("text"))
    assert tab.run(f"{by_id('to')}.value") == "English (en)"


@pytest.mark.parametrize("field", ["from", "to"])
def test_another_language_is_chosen_in_a_field_that_has_just_had_one(
    tab: Tab, served: Served, field: str
) -> None:
    visit(tab, served)
    for typed, chosen in {"fran": "français (fr)", "deu": "Deutsch (de)"}.items():
        choose(tab, field, typed)
        assert tab.run(f"{by_id(field)}.value") == chosen


@pytest.mark.parametrize(
    ("accepted", "first"),
    [
        ("tr-TR,en", "Türkçe (tr)"),
        ("ja,de-CH,fr", "Deutsch (de)"),
        ("ja", "English (en)"),
    ],
)
def test_the_page_begins_in_the_reader_s_language_and_then_with_the_last_choice(
    tab: Tab, served: Served, accepted: str, first: str
) -> None:
    agent = tab.run("navigator.userAgent")
    tab.tell("Network.setUserAgentOverride", userAgent=agent, acceptLanguage=accepted)
    values = f"[{by_id('from')}.value, {by_id('to')}.value]"
    visit(tab, served)
    assert tab.run(values) == ["Auto-detect", first]
    choose(tab, "from", "deu")
    choose(tab, "to", "ara")
    visit(tab, served, forgets=False)
    assert tab.run(values) == ["Deutsch (de)", "العربية (ar)"]


def test_a_language_whose_name_begins_with_what_is_typed_comes_first(
    tab: Tab, served: Served
) -> None:
    visit(tab, served)
    tab.click(by_id("from"))
    tab.type("e")
    codes = "[...document.querySelectorAll('#from-list li')].map(item => item.id)"
    assert tab.run(codes) == ["from-en", "from-auto", "from-de", "from-fr", "from-tr"]


def test_the_page_is_used_without_a_mouse(tab: Tab, served: Served) -> None:
    visit(tab, served, script=NO_TIMERS)  # so that Ctrl+Enter alone translates
    for _ in range(5):
        tab.press("Tab", SHIFT)
    tab.type("germ")
    tab.press("Enter")
    for _ in range(2):
        tab.press("Tab")
    tab.press("ArrowDown")  # opens the list at English
    for _ in range(3):
        tab.press("ArrowUp")
    active = "document.getElementById(document.activeElement.getAttribute('aria-activedescendant'))"
    assert tab.run(f"[{active}.id, {active}.ariaSelected]") == ["to-tr", "true"]
    tab.press("ArrowUp")
    assert tab.run(f"{active}.id") == "to-fr"
    tab.press("Tab")
    assert tab.run(f"[{by_id('from')}.value, {by_id('to')}.value]") == [
        "Deutsch (de)",
        "français (fr)",
    ]
    for _ in range(2):
        tab.press("Tab")
    for line in LINES.split("\n"):
        tab.type(line)
        tab.press("Enter")
    assert not bodies(tab)
    tab.press("Enter", CTRL)
    fields = {"q": f"{LINES}\n", "source": "de", "target": "fr"}
    for name in SYSTEMS:
        answer = served.post(**fields, system=name).json()
        wait_for_text(tab, name, answer["translatedText"])
    stops = []
    for _ in range(4):
        tab.press("Tab")
        stops.append(tab.run("document.activeElement.localName"))
    assert stops == ["button", "p", "button", "p"]
    words = alignments(served.post(**fields, system="wide", details=True).json())
    assert len(words) > 2, "The arrow keys have nowhere to go."
    for key, index in {"ArrowRight": (0, 1, 2), "ArrowLeft": (1, 0, 0)}.items():
        for at in index:
            tab.press(key)
            assert tab.run("document.querySelector('.pointed').textContent") == words[at][0]
            assert marked(tab) == words[at][1]
    for _ in range(3):
        tab.press("Tab", SHIFT)
    assert not marked(tab)
    for _ in range(2):
        tab.press("Tab", SHIFT)
    assert tab.run("document.activeElement.type") == "checkbox"
    tab.press(" ")
    assert tab.run(f"{within('wide', 'p')}.offsetParent") is None


def test_arrow_keys_follow_the_direction_of_the_translation(tab: Tab, served: Served) -> None:
    visit(tab, served)
    choose(tab, "to", "ara")
    choose(tab, "from", "deu")
    fill(tab, LINES)
    answer = served.post(q=LINES, target="ar", details=True).json()
    wait_for_text(tab, "narrow", answer["translatedText"])
    tab.run(f"{within('narrow', 'p')}.focus()")
    found = []
    for key in ("ArrowLeft", "ArrowLeft", "ArrowRight"):
        tab.press(key)
        found.append(tab.run("document.querySelector('.pointed').textContent"))
    first, second, *_ = (word for word, _ in alignments(answer))
    assert found == [first, second, first]


def test_an_aligned_word_under_the_mouse_marks_the_words_of_the_source(
    tab: Tab, served: Served
) -> None:
    visit(tab, served)
    choose(tab, "from", "deu")
    choose(tab, "to", "engl")
    fill(tab, LINES)
    answer = served.post(q=LINES, system="wide", details=True).json()
    wait_for_text(tab, "wide", answer["translatedText"])
    expected = alignments(answer)
    spans = f"[...{within('wide', 'p')}.querySelectorAll('span')]"
    assert tab.run(f"{spans}.map(word => word.textContent)") == [word for word, _ in expected]
    tab.run("document.activeElement.blur()")
    plain = tab.picture(by_id("text"))
    for at, (word, sources) in enumerate(expected):
        tab.hover(f"{spans}[{at}]")
        assert marked(tab) == sources
        first, arrow, *others = tab.run(f"{within('wide', '.note')}.textContent").split()
        assert (first, arrow) == (f"\u2068{word}\u2069", "←")
        assert sorted(others) == sorted(f"\u2068{source}\u2069" for source in sources)
    assert tab.picture(by_id("text")) != plain
    assert tab.run(f"{by_id('mirror')}.textContent") == f"{LINES}\n"
    same = "font width height padding borderWidth textAlign direction whiteSpace".split()
    styles = f"{same}.map(name => getComputedStyle(element)[name])"
    both = tab.run(
        f"['text', 'mirror'].map(id => (element => {styles})(document.getElementById(id)))"
    )
    assert both[0] == both[1]
    tab.hover("document.querySelector('h1')")
    assert not marked(tab)
    assert tab.picture(by_id("text")) == plain
    tab.hover(f"{spans}[0]")
    tab.click(by_id("text"))
    tab.type("x")
    tab.hover(f"{spans}[0]")
    assert not marked(tab), "The text is no longer the one that was translated."


@pytest.mark.parametrize(("source", "is_aligned"), [("deu", False), ("engl", True)])
def test_words_through_a_pivot_are_aligned_with_no_word_of_the_source(
    tab: Tab, models: list[str], source: str, is_aligned: bool
) -> None:
    with serving(models[0], "--set", "decoding.pivot=en") as (through, _):
        visit(tab, through)
        choose(tab, "from", source)
        choose(tab, "to", "fran")
        fill(tab, LINES)
        code = "en" if is_aligned else "de"
        answer = through.post(q=LINES, source=code, target="fr", details=True).json()
        assert alignments(answer)
        wait_for_text(tab, "narrow", answer["translatedText"])
        assert tab.run(f"{within('narrow', 'span')} !== null") == is_aligned


@pytest.mark.parametrize("text", ["Ja.\n" * 100_000, "Ja. " * 100_000], ids=["lines", "line"])
def test_a_long_text_is_refused_as_any_other(tab: Tab, served: Served, text: str) -> None:
    visit(tab, served)
    tab.run(f"{by_id('text')}.value = {json.dumps(text)}; {by_id('text')}.oninput()")
    wait_for_note(tab, "400,000 of 2,000 characters")
    tab.wait_for(f"{within('wide', 'p')}.className === 'wrong'")
    assert tab.run(f"{by_id('mirror')}.textContent.length") == len(text) + 1


def test_a_translation_is_copied_or_selected_where_there_is_no_clipboard(
    tab: Tab, served: Served
) -> None:
    permission = {"name": "clipboard-read"}
    tab.tell("Browser.setPermission", permission=permission, setting="granted")
    expected = served.post(q=LINES, system="wide").json()["translatedText"]
    copied = {
        "Copied": ("", "navigator.clipboard.readText()"),
        "Selected": (NO_CLIPBOARD, "getSelection().toString()"),
    }
    for told, (script, read) in copied.items():
        visit(tab, served, script=NO_TIMERS + script)
        assert tab.run(f"{within('wide', 'button')}.disabled")
        fill(tab, LINES)
        choose(tab, "from", "deu")
        choose(tab, "to", "engl")
        wait_for_text(tab, "wide", expected)
        tab.click(within("wide", "button"))
        tab.wait_for(f"{within('wide', 'button')}.textContent === '{told}'")
        assert tab.run(read) == expected


def test_languages_and_texts_are_swapped(tab: Tab, served: Served) -> None:
    values = f"[{by_id('from')}.value, {by_id('to')}.value, {by_id('text')}.value]"
    visit(tab, served)
    choose(tab, "to", "engl")
    tab.click(by_id("swap"))
    wait_for_note(tab, "No language has been detected yet. Choose the one to swap.")
    fill(tab, GERMAN)
    there = served.post(q=GERMAN, source="auto").json()["translatedText"]
    wait_for_text(tab, "narrow", there)
    wait_for_note(tab, "Detected: Deutsch")
    tab.click(by_id("swap"))
    assert tab.run(values) == ["English (en)", "Deutsch (de)", there]
    back = served.post(q=there, source="en", target="de").json()["translatedText"]
    wait_for_text(tab, "narrow", back)
    tab.click(by_id("swap"))
    assert tab.run(values) == ["Deutsch (de)", "English (en)", back]


def test_a_swap_keeps_what_is_typed_until_its_translation_is_there(
    tab: Tab, served: Served
) -> None:
    visit(tab, served, script=NO_TIMERS)
    fill(tab, "Haus")
    choose(tab, "from", "deu")
    choose(tab, "to", "engl")
    wait_for_text(tab, "narrow", served.post(q="Haus").json()["translatedText"])
    fill(tab, GERMAN)
    tab.click(by_id("swap"))
    assert tab.run(f"{by_id('text')}.value") == GERMAN, "Only an earlier text is translated."
    answer = served.post(q=GERMAN, source="en", target="de").json()
    wait_for_text(tab, "narrow", answer["translatedText"])
    tab.run("window.fetch = () => new Promise(() => {})")
    choose(tab, "to", "fran")
    tab.click(by_id("swap"))
    assert tab.run(f"{by_id('text')}.value") == GERMAN, "It is translated into German, not French."


def test_a_server_with_a_key_translates_when_the_key_is_typed(
    tab: Tab, served: Served, models: list[str], tmp_path: Path
) -> None:
    (tmp_path / "key").write_text("geheim\n", encoding="utf-8")
    visit(tab, served)
    assert not tab.run(f"{by_id('key')}.checkVisibility()")
    with serving(models[0], "--key-file", str(tmp_path / "key")) as (locked, _):
        visit(tab, locked)
        tab.requests.clear()
        choose(tab, "from", "deu")
        choose(tab, "to", "engl")
        fill(tab, "Haus")
        wait_for_text(tab, "narrow", locked.post(q="Haus").refusal())
        assert tab.run(f"getComputedStyle({within('narrow', 'p')}).color") == RED
        tab.click(by_id("key"))
        tab.type("geheim")
        tab.press("Enter")
        answer = locked.post(q="Haus", api_key="geheim").json()
        wait_for_text(tab, "narrow", answer["translatedText"])
        assert tab.run(f"getComputedStyle({within('narrow', 'p')}).color") != RED


def test_what_cannot_be_translated_is_told_in_the_place_of_the_translation(
    tab: Tab, served: Served
) -> None:
    visit(tab, served)
    choose(tab, "from", "deu")
    choose(tab, "to", "turk")
    fill(tab, "Haus")
    wait_for_text(tab, "narrow", served.post(q="Haus", target="tr", system="narrow").refusal())
    wait_for_text(tab, "wide", served.post(q="Haus", target="tr").json()["translatedText"])
    colors = [tab.run(f"getComputedStyle({within(name, 'p')}).color") for name in SYSTEMS]
    assert colors[0] == RED != colors[1]
    assert tab.run(f"[{within('narrow', 'button')}.disabled, {within('narrow', 'p')}.dir]") == [
        True,
        "ltr",
    ]
    fill(tab, "a" * (LIMIT + 1))
    wait_for_text(tab, "wide", served.post(q="a" * (LIMIT + 1)).refusal())
    wait_for_note(tab, "2,001 of 2,000 characters")
    fill(tab, "")
    for name in SYSTEMS:
        wait_for_text(tab, name, "")


def test_a_server_that_is_gone_is_told(tab: Tab, served: Served) -> None:
    visit(tab, served)
    choose(tab, "from", "deu")
    choose(tab, "to", "engl")
    tab.tell("Network.setBlockedURLs", urls=["*/translate"])
    fill(tab, "Haus")
    wait_for_text(tab, "narrow", "The server does not answer.")
    assert tab.run("document.querySelector('article').ariaBusy") == "false"
    tab.tell("Network.setBlockedURLs", urls=["*/languages"])
    tab.tell("Page.reload")
    wait_for_note(tab, "The server does not answer.")
    tab.tell("Network.setBlockedURLs", urls=[])


def test_a_text_from_right_to_left_begins_at_the_right(tab: Tab, served: Served) -> None:
    visit(tab, served)
    direction = f"getComputedStyle({by_id('text')}).direction"
    assert tab.run(direction) == "ltr"
    fill(tab, "بيت قديم")
    assert tab.run(direction) == "rtl"
    choose(tab, "from", "ara")
    choose(tab, "to", "engl")
    shown = within("narrow", "p")
    answer = served.post(q="بيت قديم", source="ar", details=True).json()
    wait_for_text(tab, "narrow", answer["translatedText"])
    assert tab.run(f"{shown}.dir") == "ltr"
    tab.hover(f"{shown}.querySelector('span')")
    assert marked(tab) == alignments(answer)[0][1]
    edge = tab.run("Math.max(...[...document.querySelectorAll('mark')].map(m => m.offsetLeft))")
    assert edge > tab.run(f"{by_id('text')}.clientWidth / 2")
