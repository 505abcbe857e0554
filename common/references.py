"""How references to models are written for people."""

import re
from typing import assert_never

import httpx

from common.models import HuggingFaceModel, LocalModel, UrlModel


def describe(reference: LocalModel | HuggingFaceModel | UrlModel) -> str:
    """As an operator would write it, without what could be a secret."""
    match reference:
        case LocalModel(path):
            return path
        case HuggingFaceModel(repo_id, filename, revision):
            return f"https://huggingface.co/{repo_id}/blob/{revision}/{filename}"
        case UrlModel(url):
            return _without_secrets(url)
        case _:
            assert_never(reference)


def _without_secrets(text: str) -> str:
    try:
        url = httpx.URL(text)
    except httpx.InvalidURL:
        # Nobody knows what its parts are: all that could be a password or a query goes.
        return re.split("[?#]", text.rpartition("@")[2])[0]
    if not url.host:
        return re.split("[?#]", text.rpartition("@")[2])[0]
    path = url.raw_path.decode("ascii").partition("?")[0]
    return f"{url.scheme}://{url.netloc.decode('ascii')}{path}"
