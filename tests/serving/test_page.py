"""The page of `mcore-rl serve` in a headless Chromium: `make test-browser`."""

import shutil

import pytest
from served_models import served_by_command
from small_models import make_model

pytestmark = pytest.mark.browser


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("page") / "model"
    make_model("qwen2", path, initializer_range=0.1)
    return path


@pytest.fixture
def page():
    from playwright.sync_api import sync_playwright

    with sync_playwright() as started:
        program = next(filter(None, map(shutil.which, ("chromium", "google-chrome", "chromium-browser"))), None)
        browser = started.chromium.launch(executable_path=program, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1100, "height": 800})
        page.errors = []
        page.on("pageerror", lambda error: page.errors.append(str(error)))
        yield page
        browser.close()


def ask(page, prompt, **values):
    for name, value in values.items():
        page.fill(f"#{name}", str(value))
    page.fill("#prompt", prompt)
    page.click("#send")
    page.wait_for_function("!document.getElementById('send').disabled", timeout=60_000)


def test_a_prompt_is_answered_with_coloured_tokens(page, model, tmp_path):
    visible = "grpo.sample_unused_ids=false"  # ids without a token have no text
    with served_by_command(model, "model.dtype=float32", visible) as served:
        page.goto(served.url)
        assert page.title() == "model"
        ask(page, "hello", temperature=0, max_tokens=12, system="Be short.")
        messages = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "hello"}]
        body = {"messages": messages, "temperature": 0, "max_tokens": 12, "logprobs": True}
        tokens = served.post("/v1/chat/completions", body).json()["choices"][0]["logprobs"]["content"]
        spans = page.locator("#answer span")
        assert spans.all_text_contents() == [token["token"] for token in tokens]
        titles = [spans.nth(index).get_attribute("title") for index in range(spans.count())]
        assert [title.split()[0] for title in titles] == [f"{token['logprob']:.3f}" for token in tokens]
        assert "background" in spans.first.get_attribute("style")
        facts = page.inner_text("#facts")
        assert facts.startswith(f"{len(tokens)} tokens, ") and "tokens/s" in facts
        page.screenshot(path=tmp_path / "page.png")

        page.check("#raw")
        ask(page, "ab", max_tokens=5)
        assert page.locator("#answer span").count() == 5 and "ended by: length" in page.inner_text("#facts")
        ask(page, "a" * 5000)
        assert "maximum context length" in page.inner_text("#error")
        assert page.errors == []


def test_the_page_asks_for_the_key(page, model):
    with served_by_command(model, "model.dtype=float32", key="sk-secret") as served:
        page.goto(served.url)
        ask(page, "hello", max_tokens=3)
        assert page.inner_text("#error") == "the API key is wrong" and page.is_visible("#key")
        ask(page, "hello", key="sk-secret", max_tokens=3)
        assert page.inner_text("#error") == "" and page.locator("#answer span").count() > 0
        assert page.errors == []
