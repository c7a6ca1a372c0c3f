#!/bin/sh
# Makes the secrets of the compose stack, once: sh deploy/make-secrets.sh [DIRECTORY]
# Existing files are kept, so that it can be run again. To change a secret, remove the directory, run this again and
# restart the stack.
set -eu
umask 022

directory=${1:-$(dirname "$0")/secrets}
mkdir -p "$directory"
# Other users of this host cannot enter the directory. Its files are readable, since a container sees the host's owner
# and mode, and no container runs as the user who runs this.
chmod 700 "$directory"
cd "$directory"

random() { # $1 random bytes as hex digits
    od -An -N"$1" -tx1 /dev/urandom | tr -d ' \n'
}
digest() {
    printf %s "$1" | sha256sum | cut -d' ' -f1
}

# Redis: what the server asks for and what the services show. docs/redis.md has the same rights.
if [ ! -e valkey.acl ] || [ ! -e kvstore.toml ]; then
    password=$(random 32)
    cat > valkey.acl <<END
user default on nopass resetkeys resetchannels -@all +ping
user kvstore on #$(digest "$password") resetchannels ~v1/* ~quarantine:v1/* ~c1/* ~c1t/* ~c1d/* ~c1o/* ~kvstore:* -@all +@read +@write +@connection +@scripting +@transaction -@dangerous +info +role +time +asking +command +cluster|slots +cluster|shards +cluster|nodes
END
    printf 'hot = "redis://kvstore:%s@valkey:6379/0"\n' "$password" > kvstore.toml
fi

# S3: the same for its server.
if [ ! -e s3-identities.json ] || [ ! -e s3-credentials ]; then
    access_key=$(random 10)
    secret_key=$(random 32)
    cat > s3-identities.json <<END
{
  "identities": [
    {
      "name": "kvstore",
      "credentials": [{"accessKey": "$access_key", "secretKey": "$secret_key"}],
      "actions": ["Read:kvstore", "Write:kvstore", "List:kvstore"]
    }
  ]
}
END
    printf '[default]\naws_access_key_id = %s\naws_secret_access_key = %s\n' "$access_key" "$secret_key" > s3-credentials
fi

# The administration port: Prometheus and the operator show their tokens, the services know the digests.
credential() { # $1 a token, $2 its scope
    printf '[[credential]]\ntenant = "*"\nscopes = ["%s"]\ntoken_sha256 = "%s"\n' "$2" "$(digest "$1")"
}
if [ ! -e metrics-token ] || [ ! -e credentials.toml ]; then
    token=$(random 32)
    printf %s "$token" > metrics-token
    credential "$token" read > credentials.toml
    rm -f operator-token
fi
if [ ! -e operator-token ]; then
    token=$(random 32)
    (umask 077 && printf %s "$token" > operator-token) # for people on this host alone: no container has it
    credential "$token" admin >> credentials.toml
fi

if [ ! -e grafana-password ]; then
    random 16 > grafana-password
fi

echo "secrets are in $directory; Grafana's password for the user admin: $directory/grafana-password"
echo "what dashboards and the command line of the services ask for: $directory/operator-token"
