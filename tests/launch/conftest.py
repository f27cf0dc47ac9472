from tests.train.conftest import model_path

__all__ = ["model_path"]
