"""What is trained on what, and how: one file for each recipe, a function that returns a frozen `Recipe`.

Importing a recipe doesn't import torch: settings can be checked, and refused, before anything is started.
"""

from __future__ import annotations

from collections.abc import Callable

from renkei.recipes.digits import digits
from renkei.recipes.fashion_mnist import fashion_mnist
from renkei.recipes.recipe import Recipe

RECIPES: dict[str, Callable[[], Recipe]] = {"digits": digits, "fashion-mnist": fashion_mnist}
