# A node's copy of an environment's tar, or of an image: bash copy.sh prepare FOLDER, then unpack FOLDER FILE [SHA256].
# shellcheck shell=bash
folder=$2
file=$3
digest=$4
mine() { [[ -d $folder && ! -L $folder && -O $folder ]]; }

# What an earlier start of this job has left is not used again: how it ended is unknown.
if [[ $1 == prepare ]]; then
    rm -rf -- "$folder"
    mkdir -m 700 -- "$folder" 2>/dev/null
    mine
    exit
fi

unpack() {
    exec 9<"$folder" && flock -w 600 9 || return # one process at a time
    [[ ! -e $folder/copy ]] || return 0
    rm -rf -- "$folder/part" && mkdir -- "$folder/part" || return
    if [[ -n $digest ]]; then
        cp -- "$file" "$folder/part/image" && [[ $(sha256sum <"$folder/part/image") == "$digest "* ]] || return
        mv -T -- "$folder/part/image" "$folder/copy"
    else
        tar -xf "$file" -C "$folder/part" && cd -- "$folder/part" && sha256sum --check --quiet SHA256SUMS || return
        [[ ! -e pyvenv.cfg ]] || sed -i "s|@HERE@|$folder/copy|" pyvenv.cfg || return
        mv -T -- "$folder/part" "$folder/copy" # what is complete and intact gets its name
    fi
}

[[ -d $folder ]] || mkdir -m 700 -- "$folder" 2>/dev/null
mine && unpack 2>&1 | sed -n "1s|^|${SLURMD_NODENAME:-$(uname -n)}: |p" >&2 # its first error
rm -rf -- "$folder/file" "$folder/part"
[[ -O $folder/copy ]]
