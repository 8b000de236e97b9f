package evernear;

import io.netty.channel.ChannelDuplexHandler;
import io.netty.channel.ChannelHandlerContext;
import io.netty.channel.ChannelPromise;
import io.netty.handler.codec.http.DefaultFullHttpResponse;
import io.netty.handler.codec.http.HttpContent;
import io.netty.handler.codec.http.HttpHeaderNames;
import io.netty.handler.codec.http.HttpRequest;
import io.netty.handler.codec.http.HttpResponseStatus;
import io.netty.handler.codec.http.HttpUtil;
import io.netty.handler.codec.http.HttpVersion;
import io.netty.util.AttributeKey;
import io.netty.util.ReferenceCountUtil;
import java.util.List;
import java.util.Set;
import java.util.concurrent.TimeUnit;
import org.pytorch.serve.util.TokenAuthorization;
import org.pytorch.serve.util.TokenAuthorization.TokenType;

/**
 * Lets a request in by its head: before any of its body is kept it must be sound, hold the token, and fit in what may
 * be in flight. Whoever is refused gets a sentence, and the connection ends.
 */
final class Admission extends ChannelDuplexHandler {
    private static final AttributeKey<Object> SESSION = AttributeKey.valueOf("session"); // until TorchServe answers

    private final int maxBytes;
    private final Set<TokenType> tokens;
    private final boolean probed;
    private int received;
    private int held;
    private boolean refused;

    /** Wants one of {@code tokens}, if there is any; {@code probed}: but not of a probe. */
    Admission(int maxBytes, Set<TokenType> tokens, boolean probed) {
        this.maxBytes = maxBytes;
        this.tokens = tokens;
        this.probed = probed;
    }

    @Override
    public void channelRead(ChannelHandlerContext context, Object message) {
        if (!refused && isAdmitted(context, message)) {
            context.fireChannelRead(message);
        } else {
            ReferenceCountUtil.release(message);
        }
    }

    private boolean isAdmitted(ChannelHandlerContext context, Object message) {
        try {
            admit(context, message);
            return true;
        } catch (Refused refusal) {
            refused = true;
            context.writeAndFlush(refusal.answer());
            return false;
        }
    }

    private void admit(ChannelHandlerContext context, Object message) {
        if (message instanceof HttpRequest) {
            HttpRequest request = (HttpRequest) message;
            Head.check(request);
            checkToken(request);
            hold(Long.parseLong(request.headers().get(HttpHeaderNames.CONTENT_LENGTH, "0")));
            if (HttpUtil.is100ContinueExpected(request)) {
                request.headers().remove(HttpHeaderNames.EXPECT);
                context.writeAndFlush(new DefaultFullHttpResponse(HttpVersion.HTTP_1_1, HttpResponseStatus.CONTINUE));
            }
        }
        if (message instanceof HttpContent) {
            HttpContent content = (HttpContent) message;
            if (!content.decoderResult().isSuccess()) {
                throw new Refused(
                        HttpResponseStatus.BAD_REQUEST,
                        "BadRequest",
                        "The body cannot be read: " + content.decoderResult().cause().getMessage() + ".");
            }
            received += content.content().readableBytes();
            hold(received);
        }
    }

    private void checkToken(HttpRequest request) {
        if (tokens.isEmpty() || !TokenAuthorization.isEnabled() || probed && Probe.isAsked(request)) {
            return;
        }
        List<String> headers = request.headers().getAll(HttpHeaderNames.AUTHORIZATION);
        String token = headers.size() == 1 ? TokenAuthorization.parseTokenFromBearerTokenHeader(headers.get(0)) : "";
        for (TokenType type : tokens) {
            if (TokenAuthorization.checkTokenAuthorization(token, type)) {
                return;
            }
        }
        throw new Refused(
                        HttpResponseStatus.UNAUTHORIZED,
                        "Unauthorized",
                        "Token Authorization failed: the token is missing or wrong; send it in the header"
                                + " Authorization: Bearer TOKEN.")
                .with(HttpHeaderNames.WWW_AUTHENTICATE, "Bearer");
    }

    /** Makes room for a body of so many bytes, if there is less yet. */
    private void hold(long bytes) {
        if (bytes > maxBytes) {
            throw new Refused(
                    HttpResponseStatus.REQUEST_ENTITY_TOO_LARGE,
                    "TooLarge",
                    maxBytes > 0 ? "The request is larger than " + maxBytes + " bytes." : "This API takes no bodies.");
        }
        int more = Math.max((int) bytes - held, 0);
        if (!Limits.IN_FLIGHT_BYTES.tryAcquire(more)) {
            throw new Refused(HttpResponseStatus.SERVICE_UNAVAILABLE, "Overloaded", Limits.EXCEEDED)
                    .with(HttpHeaderNames.RETRY_AFTER, "1");
        }
        held += more;
    }

    @Override
    public void write(ChannelHandlerContext context, Object message, ChannelPromise promise) {
        if (Connection.isEndOfAnswer(message)) {
            promise = promise.unvoid();
            promise.addListener(written -> release());
        }
        context.write(message, promise);
    }

    @Override
    public void channelInactive(ChannelHandlerContext context) {
        releaseWhenAnswered(context, Limits.ANSWER_S);
        context.fireChannelInactive();
    }

    /** What a client leaves behind that went away stays in TorchServe's queue until it is answered. */
    private void releaseWhenAnswered(ChannelHandlerContext context, int patienceSeconds) {
        if (held > 0 && patienceSeconds > 0 && context.channel().attr(SESSION).get() != null) {
            context.executor().schedule(() -> releaseWhenAnswered(context, patienceSeconds - 1), 1, TimeUnit.SECONDS);
        } else {
            release();
        }
    }

    private void release() {
        Limits.IN_FLIGHT_BYTES.release(held);
        held = 0;
        received = 0;
    }
}
