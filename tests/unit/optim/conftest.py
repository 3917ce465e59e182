from exactness.conftest import _torch_is_warm as _torch_is_warm
