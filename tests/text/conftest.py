"""Without the packages of the real engine there is no text layer to test; the rest of the suite runs."""

from importlib.util import find_spec

if find_spec("torch") is None or find_spec("transformers") is None:
    collect_ignore_glob = ["test_*.py"]
else:
    from collections.abc import Iterator
    from pathlib import Path

    import pytest

    from experiments.text import LLM
    from tests.text.kit import ROOMY, make_folder, tokenizer_with_chat

    @pytest.fixture(scope="session")
    def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
        return make_folder(tmp_path_factory.mktemp("checkpoint") / "model", tokenizer=tokenizer_with_chat())

    @pytest.fixture(scope="session")
    def llm(folder: Path) -> Iterator[LLM]:
        """Shared: a test leaves it idle."""
        with LLM(folder, **ROOMY) as made:
            yield made
