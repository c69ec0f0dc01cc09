"""`python -m emberline` is the `emberline` command; torchrun starts it this way."""

from emberline.cli import main

if __name__ == "__main__":
    main()
