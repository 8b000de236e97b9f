"""The proxies of the environment, as messages name them."""

import pytest

from evernear.common.proxies import through_proxy


@pytest.mark.parametrize(
    ("variable", "value", "sentence"),
    [
        ("https_proxy", "http://me:pass@proxy.example:3128", " through the proxy proxy.example:3128 (HTTPS_PROXY)"),
        ("HTTPS_PROXY", "http://[::1]:3128", " through the proxy [::1]:3128 (HTTPS_PROXY)"),
        ("http_proxy", "http://proxy.example:3128", ""),
        ("no_proxy", "*", ""),
    ],
)
def test_proxy_is_named_without_its_login(
    monkeypatch: pytest.MonkeyPatch, variable: str, value: str, sentence: str
) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "https_proxy", "HTTPS_PROXY", "no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(variable, value)
    assert through_proxy("https://hub.example/weights") == sentence
    monkeypatch.setenv("NO_PROXY", "hub.example")
    assert through_proxy("https://hub.example/weights") == ""
