"""Commands of `flowrl-img`, one module each, put together by `flowrl_img.cli`. Nothing heavy is imported at the top."""
