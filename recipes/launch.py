"""`python -m recipes.launch`: what `nemorun fgo pretrain` does, without NeMo-Run's other entry points.

python -m recipes.launch --factory dsv4_flash_64gpu account=me container_image=image.sqsh --dryrun
"""

if __name__ == "__main__":
    from bridge_fgo.tools.options import mistake

    try:
        import nemo_run as run
    except ModuleNotFoundError:
        raise mistake(
            "pretrain", "NeMo-Run is not installed: pip install '.[nemo]' in a checkout of bridge_fgo"
        ) from None

    from bridge_fgo.recipes.entrypoint import Job

    try:
        run.cli.main(Job)
    except Exception as error:
        if (told := getattr(error, "format_message", None)) is None:  # click's, which NeMo-Run lets through
            raise
        raise mistake("pretrain", told()) from None
