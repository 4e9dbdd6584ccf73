"""Side by side with peers, in one run: python -m bench COMMAND --ckpt DIR"""
