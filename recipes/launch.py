"""`python -m recipes.launch`: what `nemorun fgo pretrain` does, without NeMo-Run's other entry points.

python -m recipes.launch --factory dsv4_flash_64gpu account=me container_image=image.sqsh --dryrun
"""

import nemo_run as run

from bridge_fgo.recipes.entrypoint import Job

if __name__ == "__main__":
    run.cli.main(Job)
